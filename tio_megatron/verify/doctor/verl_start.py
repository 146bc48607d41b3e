"""verl's own settings, by the tables by which its workers refuse them when they build (:mod:`tio_megatron.integrations.verl.refusals`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import TOPIC
from tio_megatron.verify.doctor.running import Running

TREE = "actor_rollout_ref"
"""Under this name a verl configuration holds its settings as verl has them, nested."""
_BREAK: dict[str, Any] = {"megatron": {"vanilla_mbridge": False}}
"""verl 0.9.1's defaults of the actor that are refused; all others in the tables are not."""


def judge(trainer: Running, rollout: Running, found: Sequence[Finding]) -> Iterator[Finding]:
    """``found``, and one ``bad`` for each line of the tables about which it says nothing; what it calls unknown is bad then."""
    lines: dict[str, Finding] = {}
    for run, role in ((trainer, "actor"), (rollout, "rollout")):
        if run.kind == "verl":
            for line in refusals.problems(_with_defaults(run.get(TREE) or {}, role), role):
                what, _, works = line.rpartition("; ")
                option = re.split(r"[=.]", line.partition("=")[0])[-1]
                lines[option] = Finding("bad", TOPIC, f"verl: {what}", works)
    for one in found:
        named = next((option for option in lines if re.search(rf"\b{option}\b", one.what)), None) if one.topic == TOPIC else None
        if named is not None and one.level == "bad":
            del lines[named]
        elif named is not None and one.level == "unknown":
            yield lines.pop(named)
            continue
        yield one
    yield from lines.values()


def _with_defaults(tree: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Without what refers to another setting (``${...}``), and with the defaults that break."""
    plain = _plain(tree)
    if role == "actor" and "actor" in plain:
        actor = plain["actor"]
        plain["actor"] = {**actor, "megatron": {**_BREAK["megatron"], **actor.get("megatron", {})}}
    return plain


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in tree.items() if not (isinstance(value, str) and "${" in value)}
    return {name: _plain(value) if isinstance(value, Mapping) else value for name, value in kept.items()}
