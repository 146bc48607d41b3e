"""A short run of ``launch/qwen3_moe.sh rl`` that can be disturbed, and what it leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path

SHORT = ("--num-layers", "1", "--pretrain-steps", "1", "--warm-steps", "4", "--prompts", "4", "--samples", "4", "--steps", "6", "--save-every", "2")


def wait(done, processes, seconds: float = 300) -> None:
    """Until ``done()``; a process that ends before is shown with what it said."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), [p.communicate() for p in processes if p.poll()]
        time.sleep(0.02)


def metrics(out: Path) -> list[dict]:
    """Its steps so far, as it writes them down."""
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def decided(out: Path) -> list[dict]:
    """The steps without what the clock says."""
    return [{name: value for name, value in step.items() if name != "tokens_per_s"} for step in metrics(out)]
