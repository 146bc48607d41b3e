"""``python -m tio_megatron.ascend_selfcheck``: what this machine's Ascend NPUs do to an order of sums. *Not run on an NPU* by those who wrote it.

On 1 to 8 NPUs, in minutes: questions to one device (is attention the same in training, prefill, chunks and decode; does a row of a product see its
neighbours; which deterministic level holds), to several (do vendor sums see the number of rows; do moved bytes and our tree give one result), then pairs
of layouts with logdiff and time beside the stock packages' way. Writes ``report.json`` and ``report.txt``: please send them.

``--twin`` asks the CPU twins instead, on any machine: that the questions are asked right is all it shows.

Exit status: 0 everything needed holds, 1 something does not, 2 there is no NPU, or bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tio_megatron.ascend_selfcheck", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/ascend"), help="where report.json and report.txt go (default: %(default)s)")
    parser.add_argument("--devices", type=int, help="how many NPUs (default: all of this machine, at most 8)")
    parser.add_argument("--twin", action="store_true", help="ask the CPU twins; works anywhere and says nothing about an NPU")
    parser.add_argument("--quick", action="store_true", help="the table of layouts and the questions between devices alone")
    options = parser.parse_args(arguments)

    from tio_megatron.findings.messages import say
    from tio_megatron.verify.ascend import place, run

    try:
        there = place.find(options.twin)
    except place.NoDevices as missing:
        print(f"ascend_selfcheck: no NPU to ask: {missing}; --twin asks the CPU twins", file=sys.stderr)
        return 2
    except ValueError as wrong:
        print(f"ascend_selfcheck: {wrong}", file=sys.stderr)
        return 2
    devices = there if options.devices is None else options.devices
    most = 4 if options.twin else there
    if not 1 <= devices <= most:
        print(f"ascend_selfcheck: --devices {devices}: 1 to {most} are here", file=sys.stderr)
        return 2
    try:
        run.versions()  # what the environment sets is refused here, before any process is started
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as wrong:
        print(f"ascend_selfcheck: {wrong}", file=sys.stderr)
        return 2
    report = run.check(options.out, devices=devices, twin=options.twin, quick=options.quick)
    say((options.out / "report.txt").read_text().removesuffix("\n"))
    return int(report["status"])


if __name__ == "__main__":
    sys.exit(main())
