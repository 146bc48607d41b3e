"""A launcher that waits inside torch for a store which says nothing: no limit of torch's ends that, and no signal is heard. A thread of its own sees it.

A store says nothing, and its connections live, where its process is stopped (``kill -STOP``, Ctrl-Z).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from examples.qwen3_moe import ending, starts
from examples.qwen3_moe.hosts import Hosts

_TICK = 0.5
_UNHEARD = 10.0
"""Seconds after which a signal that ended nothing was not heard, where torchrun has no ranks to end, or asks a store that says nothing."""


def watch(place: Hosts, answers: Callable[[], int | None], folder: Path) -> None:
    """From now on this process ends by itself, with one line, in two cases: it has no rank that runs, as while hosts come together, and the store says
    nothing for ``TIO_RENDEZVOUS_SECONDS``; or a signal was not heard, the store saying nothing or no rank running (torchrun waits five minutes for hosts
    that have not ended). To be called in the main thread.

    Args:
        place: the hosts.
        answers: how often the store has answered by now; None where nobody asks it.
        folder: torchrun's ``--log-dir``: whether ranks have been started already; removed at such an end.
    """
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_run, args=(place, answers, folder, ours, pythons), daemon=True, name="watch the store").start()


def _run(place: Hosts, answers: Callable[[], int | None], folder: Path, ours: socket.socket, pythons: socket.socket) -> None:
    quiet, unheard, asked, before, since = 0.0, 0.0, 0, answers(), time.monotonic()
    while True:
        if select.select([ours], [], [], _TICK)[0]:
            asked = next((number for number in ours.recv(64) if number in ending.SIGNALS), asked)
        now, count = time.monotonic(), answers()
        passed, since = min(now - since, 2 * _TICK), now  # a process that was stopped itself has not waited
        quiet = 0.0 if count is None or count != before else quiet + passed
        unheard = unheard + passed if asked else 0.0
        before = count
        started = bool(ending.started_below(folder))
        if asked and unheard > _UNHEARD and (quiet > _UNHEARD / 2 or not ending.running_children()):
            _leave("interrupted" if asked == signal.SIGINT else f"ended by {signal.Signals(asked).name}", 128 + asked, folder)
        if quiet > place.seconds and (starts.asks() or (started and not ending.running_children())):
            what = "go on" if started else f"bring the ranks together over {place.address}"
            why = f"the store at {place.address}:{place.port} has said nothing for {quiet:.0f} s (TIO_RENDEZVOUS_SECONDS={place.seconds})"
            _leave(f"error: torchrun cannot {what}: {why}; is the first host's launcher stopped?", 1 if started else 2, folder)


def _leave(line: str, status: int, folder: Path) -> NoReturn:
    """End the ranks, if there are any, and this process; the main thread cannot."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in ending.running_children():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(child, number)
        deadline = time.monotonic() + 3
        while ending.running_children() and time.monotonic() < deadline:
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    ending.say(line, status)
    ending.leave(status)
