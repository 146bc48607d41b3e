"""Every worker of a job says at start what it runs, and hears the others: a worker in which the plug-in did not load is named by all that have it.

Answers go through the job's key-value store, never through a collective: a worker without the plug-in would not take part, and the rest would wait in
silence. Holds no arithmetic; names no engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tio_megatron.integrations import roll_files, switch_names

logger = logging.getLogger(__name__)

VARIABLE = "TIO_START_SECONDS"
SECONDS = 300.0
"""How long workers wait for each other at start when the variable is not set."""

COMPARED = ("python", "tio_megatron", "torch", "engine", "contract", "kernels", "vocab_size", "symbols")
"""What must be the same in all workers."""


def answer(
    engine: str,
    *,
    contract: str,
    kernels: str,
    symbols: Sequence[str],
    problems: Sequence[str],
    vocab_size: int | None = None,
    through: str = "tio_megatron",
    shared: Mapping[str, str] | None = None,
    distributions: Sequence[str] = (),
) -> dict[str, Any]:
    """What this process says of itself; plain data.

    Args:
        engine: ``megatron-core`` or ``vllm``.
        contract: fingerprint, the kernels' version included.
        kernels: version of the kernels.
        symbols: that are ours here.
        problems: why the contract is not in force here, one line each.
        vocab_size: true vocabulary, where the engine must be told.
        through: who holds the patches.
        shared: symbols that somebody else patches too, and who.
        distributions: names under which the engine is published, the installed one counts.
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "python": ".".join(map(str, sys.version_info[:3])),
        "tio_megatron": version("tio_megatron"),
        "torch": version("torch"),
        "engine": f"{engine} {version(*distributions, engine)}",
        "contract": contract,
        "kernels": kernels,
        "vocab_size": vocab_size,
        "through": through,
        "symbols": sorted(symbols),
        "shared": dict(shared or {}),
        "problems": list(problems),
        "switches": switch_names.read(),
    }


def version(*names: str) -> str:
    """Of the first that is installed. A checkout that is only on the path has none."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def meet(mine: Mapping[str, Any], ranks: Sequence[int], seconds: float | None = None) -> list[dict[str, Any]]:
    """Leave this worker's answer for the others, and hear theirs.

    Args:
        mine: of :func:`answer`.
        ranks: global ranks that share a sum with this one, this one included.
        seconds: to wait; ``TIO_START_SECONDS`` or :data:`SECONDS` by default.

    Returns:
        The answers of ``ranks``, in their order.

    Raises:
        ValueError: in every worker that is here: who did not answer, who runs something else, whose patches are not in force; and what to change.
    """
    roll_files.leave(mine, ranks)
    if not dist.is_initialized() or len(ranks) < 2:
        return _judged([dict(mine)], [])
    limit = wait_seconds() if seconds is None else seconds
    store = dist.distributed_c10d._get_default_store()
    store.set(_key(mine["engine"], dist.get_rank()), json.dumps(dict(mine)))
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + limit
    for rank in ranks:
        while True:
            left = max(0.01, deadline - time.monotonic())
            theirs = _heard(store, _key(mine["engine"], rank), left)
            if theirs is not None:
                found[rank] = theirs
            # An answer of an earlier contract may lie there still: its worker is about to leave another.
            if theirs is None or not _differs(mine, theirs) or time.monotonic() >= min(deadline, deadline - limit + 5.0):
                break
            time.sleep(0.05)
    missing = [
        f"rank {rank}: tio_megatron did not load there, or its start takes longer than {limit:g} s ({VARIABLE}); every process needs the package and "
        "TIO_CONTRACT in its own environment (Ray: in runtime_env), with import tio_megatron.auto or vLLM's plug-in"
        for rank in ranks
        if rank not in found
    ]
    return _judged([found[rank] for rank in ranks if rank in found], missing)


def wait_seconds() -> float:
    """What ``TIO_START_SECONDS`` says.

    Raises:
        ValueError: it is no number above 0.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        value = float(text) if text else SECONDS
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{VARIABLE}={text!r} is not a number of seconds above 0, such as {SECONDS:g}")
    return value


def differences(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each worker whose answer differs from that of most, and for each problem that a worker has itself."""
    lines = []
    for field in COMPARED:
        values = [_shown(answer[field]) for answer in answers]
        usual = Counter(values).most_common(1)[0][0]  # the first worker's where two are equally common
        for answer, value in zip(answers, values, strict=True):
            if value != usual:
                what = f"{field} is {value}, elsewhere {usual}"
                if field == "symbols":
                    theirs = next(set(other["symbols"]) for other in answers if _shown(other["symbols"]) == usual)
                    only, lacks = sorted(set(answer["symbols"]) - theirs), sorted(theirs - set(answer["symbols"]))
                    what = f"other symbols are patched than elsewhere (more: {only or 'none'}; fewer: {lacks or 'none'})"
                lines.append(f"{who(answer)}: {what}; give every worker the same packages and TIO_CONTRACT")
    return lines + [f"{who(answer)}: {line}" for answer in answers for line in answer["problems"]]


def who(answer: Mapping[str, Any]) -> str:
    """How a worker is called in messages."""
    return f"rank {answer['rank']} (process {answer['pid']} on {answer['host']})"


def _judged(answers: list[dict[str, Any]], missing: list[str]) -> list[dict[str, Any]]:
    lines = missing + (differences(answers) if answers else [])
    if lines:
        raise ValueError("tio_megatron is not in force in every worker:\n  " + "\n  ".join(lines))
    mine = answers[0]
    logger.info("%d of %d workers: contract %s, %d symbols", len(answers), len(answers), mine["contract"], len(mine["symbols"]))
    return answers


def _differs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return any(mine[field] != theirs[field] for field in COMPARED)


def _heard(store: Any, key: str, seconds: float) -> dict[str, Any] | None:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except (dist.DistStoreError, RuntimeError):
        return None
    found: dict[str, Any] = json.loads(store.get(key))
    return found


def _key(engine: str, rank: int) -> str:
    return f"tio_megatron/roll_call/{engine.partition(' ')[0]}/{rank}"


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
