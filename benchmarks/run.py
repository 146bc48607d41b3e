"""All benchmarks: a table for people, ``out/bench/report.json`` for machines.

Every benchmark is a module with ``rows() -> list[dict]``; a row has ``name``, ``ratio``, ``goal``, ``met`` and, where it helps, ``note``. Stock and ours
alternate within one run, bytes are checked first, and a row whose bytes are wrong carries no ratio.

    python benchmarks/run.py                     all of them
    python benchmarks/run.py products attention  some of them
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("products", "attention", "gradients", "collectives", "megatron_forward", "megatron_training", "vllm_generation", "tracing")


def main(argv: list[str] | None = None) -> int:
    """Run the named benchmarks (all of them by default) and write the report. Exit status 1 if bytes were wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench" / "report.json")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))

    from rich.console import Console

    from tio_megatron.commands.tables import show_rows
    from tio_megatron.files.whole import write_whole

    console = Console()
    rows = []
    for name in options.names or BENCHMARKS:
        with console.status(f"{name} ..."):
            found = importlib.import_module(f"benchmarks.{name}").rows()
        ratios = ["bytes differ" if row["ratio"] is None else f"{row['ratio']:.2f}" for row in found]
        cells = [(row["name"], ratio, str(row["goal"]), "yes" if row["met"] else "no", row.get("note", "")) for row, ratio in zip(found, ratios, strict=True)]
        show_rows(console, ("what", "ratio", "goal", "met", "note"), cells, title=name)
        rows += [{"benchmark": name, **row} for row in found]
        write_whole(options.out, json.dumps({"machine": machine(), "rows": rows}, indent=1).encode())  # after each, so that a later failure loses nothing
    met = sum(row["met"] for row in rows)
    console.print(f"{met} of {len(rows)} goals met; report: {options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out}")
    return 1 if any(row["ratio"] is None for row in rows) else 0


def machine() -> dict[str, str | int | None]:
    """What the numbers belong to."""
    import torch

    import tio_megatron
    from tio_megatron import kernels

    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tio_megatron": tio_megatron.__version__,
        "kernels": kernels.version(),
        "commit": commit,
    }


if __name__ == "__main__":
    sys.exit(main())
