"""The main job's entry: checks the input, runs the stages, prints the table. Started by ``launch/qwen3_moe.sh`` on every rank."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples.qwen3_moe import ending
from examples.qwen3_moe.children import end_with_parent
from examples.qwen3_moe.options import Options, parse

if TYPE_CHECKING:
    from examples.qwen3_moe.stages import Stage
    from tio_megatron.contract import Contract


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank.

    Returns:
        0 every pair has logdiff 0; 1 some pair has not, or something failed; 2 the input is bad; 130 interrupted.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        options = parse(sys.argv[1:] if argv is None else argv, int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None)
        if "RANK" not in os.environ and options.trainer.ranks != 1:
            raise ValueError(f"layout {options.trainer} has {options.trainer.ranks} ranks: start it with bash launch/qwen3_moe.sh, or with torchrun")
    except ValueError as problem:
        return ending.refuse(problem)
    ending.listen(first)
    if "RANK" in os.environ:
        end_with_parent()
    try:
        return _run(options, first)
    except KeyboardInterrupt:
        return ending.interrupted()


def _run(options: Options, first: bool) -> int:
    warnings.simplefilter("ignore")  # megatron-core says on import, once a module, which accelerator packages are missing
    from examples.qwen3_moe import early, report, stages
    from examples.qwen3_moe.job import Run
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.world import FirstRankFailed, World, exit_status

    screen = Screen(first)
    world: World | None = None
    scratch: Path | None = None

    def tell(error: Exception) -> int:
        """Report an error of this rank; returns the exit status."""
        status = exit_status(error)
        if status == 2:
            return ending.refuse(error)
        _wait_for_torchrun(error)
        ending.ignore_signals()
        traceback.print_exc()
        print(f"qwen3_moe: rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status

    try:
        if "RANK" not in os.environ:
            early.check_network()
        world = World(tell)

        def prepared() -> tuple[Contract, list[Stage], Path]:
            try:
                early.check(options)  # under a torchrun of the user's own nobody has looked yet
                contract = stages.contract_for(options)
                made = stages.prepare(options, contract)
                return contract, made, _scratch(options, made)
            except (OSError, ValueError) as error:
                raise ending.InputProblem(ending.describe(error)) from error

        contract, found, scratch = world.from_first(prepared)
        log = options.out / "logs"
        pairs, control, fingerprint = [], [], ""
        for number, stage in enumerate(found):
            run = Run(options, world, screen, contract, stage, scratch / str(number), log)
            run.rounds()

            def alone(run: Run = run, last: bool = number == len(found) - 1) -> None:
                run.further_trainers()
                if options.control and last:
                    control.extend(run.control())

            world.on_first(alone)
            if first:
                pairs += run.pairs()
                fingerprint = run.fingerprint

        def finish() -> int:
            more = {"fingerprint": fingerprint, "contract": contract.to_dict(), "rounds": options.rounds, "seconds": screen.seconds}
            report.show(screen.console, pairs, control)  # first: whatever happens to the disk, the numbers have been seen
            report.write(options.out, pairs, control, more)
            print(report.summary(pairs, control), flush=True)
            return 0 if pairs and all(pair.found.same for pair in pairs) else 1

        return world.from_first(finish)
    except FirstRankFailed as error:
        return error.status
    except Exception as error:
        return tell(error)
    finally:
        ending.ignore_signals()
        if scratch is not None and first:
            shutil.rmtree(scratch, ignore_errors=True)
        if world is not None:
            world.close()


def _wait_for_torchrun(error: Exception) -> None:
    """An error of a rank whose neighbour has gone says nothing; the neighbour's does, and torchrun ends this rank in a moment.

    Raises:
        KeyboardInterrupt, SystemExit: it does, or Ctrl-C reached this rank too.
    """
    if "RANK" in os.environ and any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")):
        time.sleep(10)


def _scratch(options: Options, found: Sequence[Stage]) -> Path:
    """A folder for weights and recordings on their way; in memory when it is large enough. Removed at the end."""
    from examples.qwen3_moe import folders, stages

    options.out.mkdir(parents=True, exist_ok=True)
    need = max(stages.bytes_of(stage.config) * (stage.rounds if stage.train else 0) for stage in found) + (64 << 20)
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * need
    if not roomy:
        folders.require_room(options.out, need, "--out")
    folder = Path(tempfile.mkdtemp(prefix=f"tio-job-{os.getpid()}-", dir=memory if roomy else options.out))
    for number in range(len(found)):
        (folder / str(number)).mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
