"""The main job: checks the input, runs the stages, prints the table. Started by ``launch/qwen3_moe.sh`` on every rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from examples.qwen3_moe.options import Options, parse
from examples.qwen3_moe.start import enter, prepared

if TYPE_CHECKING:
    from examples.qwen3_moe.report import Screen
    from tio_megatron.jobs.ranks import Ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this rank.

    Returns:
        0 every pair has logdiff 0; 1 some pair has not; 2 the input is bad; 130 interrupted. An error is raised.
    """
    return enter(argv, parse, _work)


def _work(options: Options, ranks: Ranks, screen: Screen) -> int:
    from examples.qwen3_moe import report
    from examples.qwen3_moe.job import Run

    with contextlib.ExitStack() as until:
        contract, found, scratch = ranks.from_first(lambda: prepared(options, until))
        pairs, control, fingerprint = [], [], ""
        for number, stage in enumerate(found):
            run = Run(options, ranks, screen, contract, stage, scratch / str(number))
            run.rounds()
            ranks.on_first(run.further_trainers)
            if ranks.first:
                pairs += run.pairs()
                fingerprint = run.fingerprint
        if options.control:
            ranks.on_first(lambda: control.extend(run.control()))

        def finish() -> int:
            more = {"fingerprint": fingerprint, "contract": contract.to_dict(), "rounds": options.rounds, "seconds": screen.seconds}
            report.show(screen.console, pairs, control)  # first: whatever happens to the disk, the numbers have been seen
            report.write(options.out, pairs, control, more)
            print(report.summary(pairs, control), flush=True)
            return 0 if pairs and all(pair.found.same for pair in pairs) else 1

        return ranks.from_first(finish)


if __name__ == "__main__":
    sys.exit(main())
