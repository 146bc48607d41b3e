"""Rank 0 at work alone: it may sample for hours, so the others wait without a limit, but only as long as they feel its pulse.

The pulse is a number in the store of the default group. A rank 0 that is killed, stopped or cut off has none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

BEATS = 8
"""In the time after which a rank 0 without pulse is given up."""


class Pulse:
    """Of one world. ``limit``: seconds without a beat after which rank 0 is lost."""

    def __init__(self, limit: float) -> None:
        self._store = dist.PrefixStore("qwen3_moe/pulse", dist.distributed_c10d._get_default_store())
        self._every, self._limit = min(1.0, limit / BEATS), limit
        self._number = 0

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Rank 0: a beat now and then; afterwards the others go on."""
        over, name = threading.Event(), self._name()

        def beat() -> None:
            count = 0
            while not over.is_set():
                count += 1
                try:
                    self._store.set(f"{name}/beat", str(count))
                except RuntimeError:  # no store, no others: they will say so
                    return
                over.wait(self._every)

        thread = threading.Thread(target=beat, daemon=True, name="pulse")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(self._every)
            self._store.set(f"{name}/done", "1")

    def wait(self) -> None:
        """The others: until rank 0 is done.

        Raises:
            RuntimeError: no beat for as long as the limit.
        """
        name, done, gone = self._name(), threading.Event(), threading.Event()
        last = [time.monotonic()]

        def feel() -> None:
            seen = b""
            while not done.is_set():
                try:
                    # In short waits: between them the store tells the beat.
                    self._store.wait([f"{name}/done"], timedelta(seconds=self._every))
                    done.set()
                except dist.DistStoreError:
                    found = self._store.get(f"{name}/beat") if self._store.check([f"{name}/beat"]) else b""
                    if found != seen:
                        seen, last[0] = found, time.monotonic()
                except RuntimeError:
                    gone.set()
                    return

        # In a thread: an answer of a store that is cut off never comes.
        threading.Thread(target=feel, daemon=True, name="pulse").start()
        while not done.wait(0.2):
            if gone.is_set():
                raise RuntimeError("Connection closed by peer: the store, where its sign of life would be")
            silent = time.monotonic() - last[0]
            if silent > self._limit:
                done.set()
                raise RuntimeError(f"Timed out waiting {silent:.0f} s for a sign of life")

    def _name(self) -> str:
        self._number += 1
        return str(self._number)
