"""The handshake: every worker of a job publishes one record of what it runs and reads the others'; one without the plug-in is named by all.

Records go through the job's key-value store, never through a collective: a worker without the plug-in would not take part, and the rest would wait in
silence. Holds no arithmetic; names no engine.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tio_megatron.findings.finding import Finding, refuse
from tio_megatron.integrations import handshake_files, releases, switch_names

logger = logging.getLogger(__name__)

VARIABLE = "TIO_START_SECONDS"
SECONDS = 300.0
"""How long workers wait for each other at start when the variable is not set."""

ABSENT = "not installed"
"""The version of a checkout that is only on the path."""

COMPARED = ("python", "tio_megatron", "torch", "engine", "packages", "contract", "kernels", "vocab_size", "symbols")
"""What must be the same in all workers."""

_TAKEN_WHERE_FOUND = {
    "numpy": "numpy",
    "apex": "apex",
    "amp_C": "amp_C",
    "transformer_engine": "transformer-engine",
    "mindspeed": "mindspeed",
    "torch_npu": "torch-npu",
}
"""Packages from which an engine takes numbers where it can import them: name to import, and of the distribution."""


def record(
    engine: str,
    *,
    contract: str,
    kernels: str,
    symbols: Sequence[str],
    problems: Sequence[str],
    vocab_size: int | None = None,
    through: str = "tio_megatron",
    shared: Mapping[str, str] | None = None,
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
    """
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "python": ".".join(map(str, sys.version_info[:3])),
        "tio_megatron": releases.installed("tio_megatron") or ABSENT,
        "torch": releases.installed("torch") or ABSENT,
        "engine": f"{engine} {releases.installed(engine) or ABSENT}",
        "packages": packages(),
        "contract": contract,
        "kernels": kernels,
        "vocab_size": vocab_size,
        "through": through,
        "symbols": sorted(symbols),
        "shared": dict(shared or {}),
        "problems": list(problems),
        "switches": switch_names.read(),
    }


def packages() -> list[str]:
    """Those packages that an engine takes numbers from where it can import them, each with its version."""
    return [f"{module} {releases.installed(name) or 'without a version'}" for module, name in _TAKEN_WHERE_FOUND.items() if _importable(module)]


def _importable(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def meet(mine: Mapping[str, Any], ranks: Sequence[int], seconds: float | None = None) -> list[dict[str, Any]]:
    """Leave this worker's record for the others, and hear theirs.

    Args:
        mine: of :func:`record`.
        ranks: global ranks that share a sum with this one, this one included.
        seconds: to wait; ``TIO_START_SECONDS`` or :data:`SECONDS` by default.

    Returns:
        The records of ``ranks``, in their order.

    Raises:
        ValueError: in every worker that is here: who did not record, who runs something else, whose patches are not in force; and what to change.
    """
    handshake_files.leave(mine, ranks)
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
            # An record of an earlier contract may lie there still: its worker is about to leave another.
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


def differences(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """One finding for each worker whose record differs from that of most, and for each problem that a worker has itself."""
    works = "give every worker the same packages and TIO_CONTRACT"
    found = unusual([{field: record[field] for field in COMPARED} for record in records], [who(record) for record in records])
    return [*(replace(one, works=works) for one in found), *(Finding(line, side=who(record)) for record in records for line in record["problems"])]


def unusual(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Finding]:
    """One finding for each value that differs from what most ``records`` have in that field; of a list, what it has more and fewer.

    Args:
        records: one for each process.
        names: what to call the processes.

    >>> [str(one) for one in unusual([{"a": 1}, {"a": 2}, {"a": 1}], ["rank 0", "rank 1", "rank 2"])]
    ['rank 1: a is 2, elsewhere 1']
    """
    found = []
    for field in dict.fromkeys(field for record in records for field in record):
        values = [record.get(field, "not there") for record in records]
        common = Counter(map(str, values)).most_common(1)[0][0]  # the first process's where two are equally common
        usual = next(value for value in values if str(value) == common)
        for name, value in zip(names, values, strict=True):
            if str(value) == common:
                continue
            if isinstance(value, list) and isinstance(usual, list):
                more, fewer = sorted(set(value) - set(usual)), sorted(set(usual) - set(value))
                why = f"other {field} than elsewhere (more: {', '.join(more) or 'none'}; fewer: {', '.join(fewer) or 'none'})"
                found.append(Finding(why, side=name))
            else:
                found.append(Finding(f"{field} is {value}, elsewhere {usual}", side=name))
    return found


def who(record: Mapping[str, Any]) -> str:
    """How a worker is called in messages."""
    return f"rank {record['rank']} (process {record['pid']} on {record['host']})"


def _judged(records: list[dict[str, Any]], missing: list[str]) -> list[dict[str, Any]]:
    refuse("tio_megatron is not in force in every worker", [*missing, *(differences(records) if records else [])])
    mine = records[0]
    logger.info("%d of %d workers: contract %s, %d symbols", len(records), len(records), mine["contract"], len(mine["symbols"]))
    return records


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
    return f"tio_megatron/handshake/{engine.partition(' ')[0]}/{rank}"
