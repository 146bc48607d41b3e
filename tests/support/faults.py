"""``make faults``: plants a fault for every row of the field reports, lets the diagnosis name it, and writes the table in docs/divergence.md.

Each fault is planted several times, at other places and sizes, in other layers and types; it counts as named right only if every one of them is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from planted_faults import FAULTS, Truth, clean, plant

from tio_megatron.traces import open_trace
from tio_megatron.verify.diagnosis import Finding, diagnose

PAGE = Path(__file__).resolve().parents[2] / "docs" / "divergence.md"
BEGIN, END = "<!-- make faults: begin -->", "<!-- make faults: end -->"


def right(found: Finding, truth: Truth) -> bool:
    """Kind, cause and place; the parameter where one is at fault; the size of what has one; what differs beside the cause where that is known."""
    named = found.kind == truth.kind and found.cause in truth.causes and found.parameter.startswith(truth.parameter)
    if "temperature" in truth.details:
        told = [found.details.get(f"temperature_{side}", 0.0) for side in "ab"]
        named = named and any(abs(value - truth.details["temperature"]) < 0.01 for value in told)
    if "parameters" in truth.details:
        named = named and found.parameter in truth.details["parameters"]
    if "axes" in truth.details:
        named = named and found.details["axes"] == truth.details["axes"]
    return named and (not truth.points or found.point in truth.points)


def examine(folder: Path) -> Finding:
    """What the diagnosis says about the traces A and B in ``folder``."""
    return diagnose(open_trace(folder / "A"), open_trace(folder / "B"))


def exchanged(folder: Path, found: Finding) -> bool:
    """Whether the same is said of the traces in ``folder`` in the other order: ``found``, with the sides exchanged."""
    other = diagnose(open_trace(folder / "B"), open_trace(folder / "A"))
    same = (other.kind, other.cause, other.point, other.parameter) == (found.kind, found.cause, found.point, found.parameter)
    return same and other.side == {"A": "B", "B": "A", "": ""}[found.side]


def title(number: int) -> str:
    """The first line of a fault's description, without its number."""
    return (FAULTS[number - 1].__doc__ or "").split(":", 1)[1].strip().splitlines()[0].rstrip(".")


def table(rows: list[tuple[int, Counter[str], int, int]], variants: int, accused: int, pairs: int) -> str:
    """The section of the page."""
    lines = [
        f"{variants} variants of each fault, each at a place, size, layer, type and side drawn anew; a diagnosis is right if kind, cause and place are, "
        "and if the same is said of the traces in the other order.",
        "",
    ]
    lines += ["| | planted | named as | right |", "| --- | --- | --- | --- |"]
    for number, named, good, total in rows:
        said = ", ".join(f"{name} ({count})" if count < total else name for name, count in named.most_common())
        lines.append(f"| {number} | {title(number)} | {said} | {good} of {total} |")
    lines += ["", f"Pairs of traces of one model in other layouts, chunks and batches, with nothing planted: {accused} of {pairs} accused."]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--variants", type=int, default=3, help="times each fault is planted")
    parser.add_argument("--seed", type=int, default=0, help="first seed; the page is written only for the default")
    parser.add_argument("--pairs", type=int, default=20, help="clean pairs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, accused = [], 0
    with tempfile.TemporaryDirectory(prefix="tio-faults-") as held:
        folder = Path(held) / "pair"
        for number in range(1, len(FAULTS) + 1):
            named: Counter[str] = Counter()
            good = 0
            for seed in range(options.seed, options.seed + options.variants):
                truth = plant(number, seed, folder)
                found = examine(folder)
                named[f"{found.kind}: {found.cause}" if found.cause else found.kind] += 1
                named_right = right(found, truth) and exchanged(folder, found)
                good += named_right
                if not named_right:
                    print(f"   seed {seed}: {found.verdict}; planted: {truth}")
            rows.append((number, named, good, options.variants))
            print(f"{number:2} {title(number):100.100} {good} of {options.variants}", flush=True)
        for seed in range(options.seed, options.seed + options.pairs):
            clean(seed, folder)
            found = examine(folder)
            accused += found.status != 0
            if found.status:
                print(f"   clean pair {seed}: {found.verdict}")
    if options.seed == 0:
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows, options.variants, accused, options.pairs)}\n{END}{rest.split(END)[1]}")
    all_right = sum(good == total for _, _, good, total in rows)
    print(f"{all_right} of {len(FAULTS)} named right, {accused} of {options.pairs} clean pairs accused")
    return int(all_right < len(FAULTS) or accused > 0)


if __name__ == "__main__":
    sys.exit(main())
