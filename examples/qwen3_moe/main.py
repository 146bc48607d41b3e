"""The main job's entry: checks the input, runs the stages, prints the table. Started by ``launch/qwen3_moe.sh`` on every rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from examples.qwen3_moe.entry import enter, prepared
from examples.qwen3_moe.options import Options, parse

if TYPE_CHECKING:
    from examples.qwen3_moe.screen import Screen
    from examples.qwen3_moe.world import World


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank.

    Returns:
        0 every pair has logdiff 0; 1 some pair has not, or something failed; 2 the input is bad; 130 interrupted.
    """
    return enter(argv, parse, _work)


def _work(options: Options, world: World, screen: Screen) -> int:
    from examples.qwen3_moe import report
    from examples.qwen3_moe.job import Run

    with contextlib.ExitStack() as until:
        contract, found, scratch = world.from_first(lambda: prepared(options, until))
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
            if world.first:
                pairs += run.pairs()
                fingerprint = run.fingerprint

        def finish() -> int:
            more = {"fingerprint": fingerprint, "contract": contract.to_dict(), "rounds": options.rounds, "seconds": screen.seconds}
            report.show(screen.console, pairs, control)  # first: whatever happens to the disk, the numbers have been seen
            report.write(options.out, pairs, control, more)
            print(report.summary(pairs, control), flush=True)
            return 0 if pairs and all(pair.found.same for pair in pairs) else 1

        return world.from_first(finish)


if __name__ == "__main__":
    sys.exit(main())
