"""What surrounds the work of every job on every rank: options, signals, the world of ranks, and how an error is told."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.qwen3_moe import ending, places
from examples.qwen3_moe.children import LAUNCHER, end_with_parent
from tio_megatron.kernels.build import LibraryError

if TYPE_CHECKING:
    from examples.qwen3_moe.options import Options
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.stages import Stage
    from examples.qwen3_moe.world import World
    from tio_megatron.contract import Contract

_TORCHS = "/torch/distributed/distributed_c10d.py"
PAUSE = 1.5
"""Seconds in which torchrun has noticed that a rank of its host has gone."""

Parse = Callable[[Sequence[str], int | None], Any]
Work = Callable[[Any, "World", "Screen"], int]


def enter(argv: Sequence[str] | None, parse: Parse, work: Work) -> int:
    """Parse the options and do ``work(options, world, screen)`` on this rank.

    Args:
        argv: the command line; this process's own if None.
        parse: makes options with a ``trainer`` layout, or raises ValueError.
        work: returns the exit status.

    Returns:
        ``work``'s; or 1 something failed, 2 the input is bad, 130 interrupted.
    """
    try:
        places.check_threads(os.environ)
        there = places.place(os.environ)
        options = parse(sys.argv[1:] if argv is None else argv, there[1] if there else None)
        if there is None and options.trainer.ranks != 1:
            raise ValueError(f"layout {options.trainer} has {options.trainer.ranks} ranks: start it with bash launch/qwen3_moe.sh, or with torchrun")
    except ValueError as problem:
        return ending.refuse(problem)
    first = there is None or there[0] == 0
    ending.listen(first)
    if there is not None:
        end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))  # the launch script, which may have been killed by now; or somebody's torchrun
    try:
        return _in_a_world(options, first, work)
    except KeyboardInterrupt:
        return ending.interrupted()
    except SystemExit as left:  # a signal: its handler has said which
        return left.code if isinstance(left.code, int) else 1


def _in_a_world(options: Any, first: bool, work: Work) -> int:
    warnings.simplefilter("ignore")  # megatron-core says on import, once a module, which accelerator packages are missing
    try:
        from examples.qwen3_moe import early

        early.check_variables()
    except (LibraryError, ValueError) as problem:  # of the kernels: no library, or an instruction set that this processor lacks
        return ending.refuse(problem)
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.world import FirstRankFailed, World, exit_status
    from tio_megatron.collectives import failure

    screen = Screen(first)
    world: World | None = None

    def tell(error: Exception) -> int:
        """Report an error of this rank; returns the exit status."""
        status = exit_status(error)
        if status == 2:
            failure.leave(error)
            return ending.refuse(error)
        if failure.lost_others(error):  # of a collective that is not ours
            error = failure.explained(error, collective_of(error))
        if isinstance(error, failure.CollectiveError):
            # One line says it, and the missing rank's own is better: torchrun ends this rank in a moment if it was one of this host.
            if error.waited < failure.patience():
                time.sleep(PAUSE)
            return ending.say(f"rank {os.environ.get('RANK', '0')}: {error}", status, everywhere=True)
        failure.leave(error)
        ending.ignore_signals()
        traceback.print_exc()
        print(f"qwen3_moe: rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status

    try:
        if "RANK" not in os.environ:
            early.check_network()
        world = World(tell)
        if world.size > 1:
            from examples.qwen3_moe import agreement

            agreement.require(world, options)
        return work(options, world, screen)
    except FirstRankFailed as error:
        return error.status
    except Exception as error:
        return tell(error)
    finally:
        ending.ignore_signals()
        if world is not None:
            world.close()


def collective_of(error: BaseException) -> str:
    """Words for the collective of torch's that an error comes from, by its frames: its name where it was called, and who called it or waited for it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame.name for frame in frames if frame.filename.endswith(_TORCHS)]
    callers = [frame for frame in frames if "/torch/distributed/" not in frame.filename]
    what = f"torch's {inside[0]}" if inside else "a collective of torch's"
    return f"{what} (in {callers[-1].name} of {Path(callers[-1].filename).name}:{callers[-1].lineno})" if callers else what


def prepared(options: Options, until: contextlib.ExitStack) -> tuple[Contract, list[Stage], Path]:
    """The contract, the stages and a folder for what is on its way between the engines (on rank 0).

    Until ``until`` is closed the job's folders are its own; then what is on its way is removed.

    Raises:
        InputProblem: bad input, in one line.
    """
    from examples.qwen3_moe import early, folders, stages

    try:
        early.check(options)  # under a torchrun of the user's own nobody has looked yet
        for folder in options.folders:
            until.enter_context(folders.claimed(folder))
        contract = stages.contract_for(options)
        made = stages.prepare(options, contract)
        scratch = _scratch(options, made)
        until.callback(shutil.rmtree, scratch, ignore_errors=True)
        until.enter_context(folders.held(scratch))
        return contract, made, scratch
    except (OSError, ValueError) as error:
        raise ending.InputProblem(ending.describe(error)) from error


def _scratch(options: Options, found: Sequence[Stage]) -> Path:
    """A folder for weights and recordings on their way; in memory when it is large enough. Whoever gets it removes it."""
    import tempfile

    from examples.qwen3_moe import folders, stages

    need = max(stages.bytes_of(stage.config) * (stage.rounds if stage.train else 0) for stage in found) + (64 << 20)
    memory = Path("/dev/shm")
    for place in (memory, options.out):
        folders.remove_left_behind(place, "tio-job-")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * need
    if not roomy:
        folders.require_room(options.out, need, "--out")
    folder = Path(tempfile.mkdtemp(prefix=f"tio-job-{os.getpid()}-", dir=memory if roomy else options.out))
    for number in range(len(found)):
        (folder / str(number)).mkdir()
    return folder
