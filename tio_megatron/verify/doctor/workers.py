"""What the workers of a job say they run: the files that ``TIO_HANDSHAKE`` makes each of them leave, read and laid side by side from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.finding import Finding, Level
from tio_megatron.findings.messages import cut, named, shown
from tio_megatron.integrations import handshake
from tio_megatron.integrations.handshake_files import FORMAT, SUFFIX, VARIABLE
from tio_megatron.integrations.switch_names import OURS
from tio_megatron.verify.doctor import switches
from tio_megatron.verify.doctor.switch_table import HARMLESS

TOPIC = "workers"
MOST_BYTES = 1 << 20
_TYPES: dict[str, type | tuple[type, ...]] = {
    "job": str, "time": (int, float), "ranks": list, "rank": int, "pid": int, "host": str, "python": str, "tio_megatron": str, "torch": str, "engine": str,
    "contract": str, "kernels": str, "vocab_size": (int, type(None)), "through": str, "symbols": list, "shared": dict, "problems": list, "switches": dict,
}  # fmt: skip
_PERHAPS = (
    f"tio_megatron did not load there (every process needs the package and TIO_CONTRACT in its own environment; Ray: in runtime_env), or {VARIABLE} is not in "
    "that worker's environment, or its model is not being built yet"
)


def read(folder: Path) -> list[dict[str, Any]]:
    """The answers of all workers that left one, by job and rank. Files of other names are not looked at.

    Raises:
        ValueError: no such folder, no answer in it, or a file that is none; says which.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; {VARIABLE} names it in the environment of every worker")
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))
    if not files:
        raise ValueError(f"{folder}: no worker has left an answer (*{SUFFIX}): {_PERHAPS}")
    return sorted((_answer(path) for path in files), key=lambda answer: (answer["job"], answer["rank"]))


def check(answers: Sequence[Mapping[str, Any]], device: str = "cpu", contract: str | None = None) -> Iterator[Finding]:
    """Every job of ``answers`` by itself, then all of them against each other.

    Args:
        answers: of :func:`read`.
        device: where the workers run (``cpu``, ``cuda`` or ``npu``): whose environment variables count.
        contract: as ``TIO_CONTRACT`` takes it: what all should run; None where they only have to agree.
    """
    jobs: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for answer in answers:
        jobs[answer["job"]].append(answer)
    for held in jobs.values():
        yield from _job(held, device)
    if contract is not None:
        from tio_megatron.contract.environment import read as asked

        wanted = asked(contract).contract
        for held in jobs.values():
            theirs = wanted.fingerprint(held[0]["kernels"])
            if held[0]["contract"] != theirs:
                yield Finding(f"{_name(held)}: contract {cut(held[0]['contract'])}, not {theirs} as asked for", "the same TIO_CONTRACT everywhere", topic=TOPIC)
    if len({held[0]["contract"] for held in jobs.values()}) > 1:
        each = "; ".join(f"{_name(held)}: {cut(held[0]['contract'])}" for held in jobs.values())
        yield Finding(
            f"jobs in this folder run other contracts: {each}", "the same TIO_CONTRACT for trainer and rollout; a new folder for each run", topic=TOPIC
        )


def _job(held: Sequence[Mapping[str, Any]], device: str) -> Iterator[Finding]:
    """One engine's workers."""
    name = _name(held)
    expected = sorted({rank for answer in held for rank in answer["ranks"]})
    missing = sorted(set(expected) - {answer["rank"] for answer in held})
    if missing:
        yield Finding(f"{name}: no answer from rank {named([str(rank) for rank in missing])} of {len(expected)}", _PERHAPS, topic=TOPIC)
    found = handshake.differences(held)
    for finding in found:
        yield replace(finding, why=cut(finding.why, 1000), side=f"{name}: {cut(finding.side)}", topic=TOPIC)
    if not missing and not found:
        first = held[0]
        age = max(0.0, time.time() - max(answer["time"] for answer in held))
        said = f"{len(held)} of {len(expected)} workers run contract {cut(first['contract'])}, tio_megatron {first['tio_megatron']}, torch {first['torch']}"
        yield Finding(f"{name}: {said}, {len(first['symbols'])} symbols patched; {age:.0f} s ago", level="ok", topic=TOPIC)
    for symbol, others in sorted({pair for answer in held for pair in answer["shared"].items()}):
        yield Finding(f"{name}: {cut(symbol)} is shared with {cut(str(others))}", level="note", topic=TOPIC)
    yield from _switches(name, held, device)


def _switches(name: str, held: Sequence[Mapping[str, Any]], device: str) -> Iterator[Finding]:
    """What differs between the workers' environments, and what each of them sets against a fixed order."""
    apart = set()
    for variable in sorted({variable for answer in held for variable in answer["switches"]}):
        values: dict[str, list[int]] = defaultdict(list)
        for answer in held:
            values[cut(answer["switches"].get(variable, "unset"))].append(answer["rank"])
        if len(values) > 1 and not variable.startswith(HARMLESS):
            apart.add(variable)
            each = ", ".join(f"{value} in rank {named([str(rank) for rank in ranks])}" for value, ranks in values.items())
            level: Level = "bad" if variable in OURS else "note"
            yield Finding(f"{name}: {variable} is {each}", "the same in the environment of every worker", level=level, topic=TOPIC)
    seen: dict[Finding, list[int]] = defaultdict(list)
    for answer in held:
        for finding in switches.judged(device, answer["switches"], plugged=True, started=True):
            if finding.level != "ok":
                seen[finding].append(answer["rank"])
    for finding, ranks in seen.items():
        where = "every worker" if len(ranks) == len(held) else f"rank {named([str(rank) for rank in ranks])}"
        yield replace(finding, side=f"{name}: {where}", topic=TOPIC)


def _name(held: Sequence[Mapping[str, Any]]) -> str:
    return cut(f"{held[0]['engine']}, job {held[0]['job'].rpartition('-')[2]}")


def _answer(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; a worker's answer has at most {MOST_BYTES}")
    try:
        found = read_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no answer of a worker: {cut(str(error))}") from None
    if not isinstance(found, dict) or found.get("tio_handshake") != FORMAT:
        raise ValueError(f"{path}: no answer of a worker: tio_handshake {FORMAT} was expected, as tio_megatron of this release writes it")
    for field, kind in _TYPES.items():
        if field not in found or not isinstance(found[field], kind) or isinstance(found[field], bool):
            raise ValueError(f"{path}: no answer of a worker: {field!r} is {shown(found.get(field))}")
    for field in ("symbols", "problems"):
        if not all(isinstance(text, str) for text in found[field]):
            raise ValueError(f"{path}: no answer of a worker: {field!r} must hold text, is {shown(found[field])}")
    for field in ("shared", "switches"):
        if not all(isinstance(text, str) for text in found[field].values()):
            raise ValueError(f"{path}: no answer of a worker: {field!r} must hold text, is {shown(found[field])}")
    if not all(type(rank) is int for rank in found["ranks"]) or not abs(found["time"]) < 1e12:
        raise ValueError(f"{path}: no answer of a worker: ranks {shown(found['ranks'])} at {shown(found['time'])}")
    return found
