"""What a person sees while the job runs: one line per finished step, a bar on long ones. Silent on all ranks but the first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int, str], None]


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
        began, notes = time.monotonic(), []
        with self.console.status(f"{name} ..."):
            yield notes.append
        self._done(name, began, "; ".join(notes))

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Advance]:
        """A step of ``total`` parts: call the yielded function with how many are done and a few words."""
        began, last = time.monotonic(), [""]
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
                progress.update(task, completed=done, note=note)

            yield advance
        self._done(name, began, last[0])

    def _done(self, name: str, began: float, note: str) -> None:
        took = time.monotonic() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + took, 2)
        self.say(f"[{time.monotonic() - self._began:6.1f} s] {name}: {took:.1f} s{f'; {note}' if note else ''}")
