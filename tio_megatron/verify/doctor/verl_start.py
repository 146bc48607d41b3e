"""verl's own settings, by the tables by which its workers refuse them when they build (:mod:`tio_megatron.integrations.verl.refusals`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor.arguments import value_of
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import TOPIC
from tio_megatron.verify.doctor.running import Running

TREE = "actor_rollout_ref"
"""Under this name a verl configuration holds its settings as verl has them, nested."""
_BREAK: dict[str, Any] = {"megatron": {"vanilla_mbridge": False}}
"""verl 0.9.1's defaults of the actor that are refused; all others in the tables are not."""
_SELECT = re.compile(r"\$\{oc\.select:([\w.]+)(?:,([^{}]*))?\}")
_JUDGED = frozenset(rule.option for rule in (*refusals.SIDE_RULES, *refusals.MODEL_RULES, *refusals.ROLLOUT_RULES))


def judge(trainer: Running, rollout: Running, found: Sequence[Finding]) -> Iterator[Finding]:
    """``found``, and one ``bad`` for each line of the tables about which it says nothing; what it calls unknown is bad then."""
    lines: dict[str, Finding] = {}
    for run, role in ((trainer, "actor_ref"), (rollout, "rollout")):
        if run.kind == "verl":
            tree, left = _resolved(run.get(TREE) or {})
            for name, value in left.items():
                what = f"verl: {TREE}.{name} = {value} is not judged: a variable that is not set here"
                lines[name] = Finding("unknown", TOPIC, what, "write it out")
            for line in refusals.problems(_with_defaults(tree, role, left), role):
                what, _, works = line.rpartition("; ")
                option = re.split(r"[=.]", line.partition("=")[0])[-1].replace("-", "_")
                lines[option] = Finding("bad", TOPIC, f"verl: {what}", works)
    for one in found:
        named = next((option for option in lines if re.search(rf"\b{re.escape(option)}\b", one.what)), None) if one.topic == TOPIC else None
        if named is not None and one.level == "bad":
            del lines[named]
        elif named is not None and one.level == "unknown":
            yield lines.pop(named)
            continue
        yield one
    yield from lines.values()


def _with_defaults(tree: Mapping[str, Any], role: str, left: Mapping[str, str]) -> dict[str, Any]:
    """With the defaults that break, where nobody has written anything."""
    if "actor" not in role or "actor" not in tree or "actor.megatron.vanilla_mbridge" in left:
        return dict(tree)
    actor = tree["actor"] if isinstance(tree["actor"], Mapping) else {}
    megatron = actor.get("megatron")
    return {**tree, "actor": {**actor, "megatron": {**_BREAK["megatron"], **(megatron if isinstance(megatron, Mapping) else {})}}}


def _resolved(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings with their ``${oc.select:NAME,DEFAULT}`` filled in; and what of the tables' settings refers to anything else (``$NAME``, ``${...}``),
    by its name, which is left out of the first."""
    left: dict[str, str] = {}

    def value_at(path: str) -> Any:
        here: Any = {TREE: tree}
        for name in path.split("."):
            here = here.get(name) if isinstance(here, Mapping) else None
        return here

    def filled(here: Mapping[str, Any], way: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in here.items():
            if isinstance(value, Mapping):
                made[name] = filled(value, f"{way}{name}.")
                continue
            for _ in range(4):  # one that refers to another
                chosen = _SELECT.fullmatch(value) if isinstance(value, str) else None
                if chosen is None:
                    break
                value = value_at(chosen[1]) if value_at(chosen[1]) is not None else value_of(chosen[2] or "null")
            if not (isinstance(value, str) and "$" in value):
                made[name] = value
            elif f"{way}{name}".partition(".")[2] in _JUDGED:
                left[f"{way}{name}"] = value
        return made

    return filled(tree, ""), left
