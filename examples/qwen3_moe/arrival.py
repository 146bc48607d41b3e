"""A host comes to the run: it shows its number in the store of torchrun's rendezvous before torchrun itself goes there.

torchrun does not know the number. Where two hosts have the same one, those that come first run, and torchrun lets the last wait in silence, beyond every
limit (``_RendezvousJoinOp`` of torch 2.13 looks at its list of redundant nodes before it looks at the time). So each host that lives beats in the store
under its number, and who finds that number beating is refused. A host whose predecessor beats no more takes its place: that is an elastic restart.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from examples.qwen3_moe import ending
from examples.qwen3_moe.hosts import Hosts
from tio_megatron.collectives import store_line

_BEAT = 0.5
_SILENT = 20.0
"""Seconds without a beat after which a host is taken for gone. More than the 15 s for which torch's rendezvous keeps one that says nothing among those
that have come: a successor that went there earlier would be counted beside it."""
_COUNT, _HOLDS = "tio_megatron/hosts", "tio_megatron/host/{rank}"
_STORE_LOST = "the store at {place.address}:{place.port} is lost: has the first host ended, or is its network down?"

_here: list[Arrival] = []
_stuck: list[threading.Thread] = []
"""In torch, asking a store that says nothing; no signal and no limit of torch's ends that."""


class Refused(ValueError):
    """This host cannot take part; in one line."""


class Arrival:
    """This host's place in the run, from when it is taken until :meth:`stop`."""

    def __init__(self, place: Hosts, answered: threading.Event | None = None) -> None:
        """Waits for the first host's store, and takes the number. ``answered`` is set when the store has said something.

        Raises:
            Refused: the store does not come within the limit, another host has this number, or hosts do not agree on how many they are.
            DistError: the store is lost meanwhile.
        """
        self._place, self._ended = place, threading.Event()
        self.answers: int | None = None
        """How many beats the store has taken; None where nobody asks it, before and after."""
        _find(place)
        self._store = dist.TCPStore(place.address, place.port, None, False, timedelta(seconds=place.seconds), wait_for_workers=False)
        store_line.limit(place.port, max(place.seconds, ending.STORE_SECONDS))
        self._beats = f"tio_megatron/beats/{uuid.uuid4().hex}"
        self._agree()
        if answered is not None:
            answered.set()
        self._store.add(self._beats, 1)
        self._take()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="this host's number")
        self._thread.start()

    def stop(self) -> bool:
        """End the beating. Returns: whether it has ended; it waits for a store that says nothing else."""
        self._ended.set()
        self._thread.join(2.0)
        return not self._thread.is_alive()

    def absent(self) -> list[int]:
        """The numbers that no host has taken yet."""
        return [rank for rank in range(self._place.count) if not self._store.check([_HOLDS.format(rank=rank)])]

    def lost(self) -> list[int]:
        """The numbers whose host has come, and says nothing any more. Takes two seconds."""

        def beats() -> dict[int, int]:
            keys = {rank: _HOLDS.format(rank=rank) for rank in range(self._place.count)}
            return {rank: self._store.add(self._store.get(key).decode(), 0) for rank, key in keys.items() if self._store.check([key])}

        before = beats()
        time.sleep(4 * _BEAT)
        now = beats()
        return [rank for rank, count in before.items() if count == now.get(rank)]

    def _agree(self) -> None:
        count = str(self._place.count)
        found = self._store.compare_set(_COUNT, "", count).decode()
        if found != count:
            raise Refused(f"NNODES is {count} here and {found} on the hosts that have come to {self._place.address}:{self._place.port}; give all the same")

    def _take(self) -> None:
        """Raises: Refused: somebody has the number, and lives."""
        key = _HOLDS.format(rank=self._place.rank)
        held = self._store.compare_set(key, "", self._beats).decode()
        while held != self._beats:
            if self._moves(held):
                raise Refused(too_many(self._place))
            held = self._store.compare_set(key, held, self._beats).decode()

    def _moves(self, beats: str) -> bool:
        before, deadline = self._store.add(beats, 0), time.monotonic() + _SILENT
        while time.monotonic() < deadline:
            time.sleep(_BEAT / 2)
            if self._store.add(beats, 0) != before:
                return True
        return False

    def _beat(self) -> None:
        self.answers = 0
        while not self._ended.wait(_BEAT):
            try:
                self._store.add(self._beats, 1)
            except (dist.DistError, RuntimeError):  # the store is lost: torchrun and the ranks notice themselves
                self.answers = None
                return
            self.answers += 1


def come(place: Hosts) -> None:
    """Take this host's place; :func:`leave` ends it.

    Raises:
        Refused: as :class:`Arrival` says; or something has the port, and does not answer as a store does.
        DistError: the store is lost meanwhile.
    """
    answered, ended, problems = threading.Event(), threading.Event(), list[BaseException]()

    def arrive() -> None:
        try:
            _here.append(Arrival(place, answered))
        except dist.DistError as problem:
            problems.append(Refused(_STORE_LOST.format(place=place)) if answered.is_set() else problem)
        except BaseException as problem:  # raised again below
            problems.append(problem)
        answered.set()
        ended.set()

    # Not in this thread: one that waits for another machine inside torch hears no signal.
    thread = threading.Thread(target=arrive, daemon=True, name="this host comes")
    thread.start()
    if not (answered.wait(place.seconds + 1) and ended.wait(_SILENT + 10)):
        _stuck.append(thread)
        raise Refused(
            f"torchrun cannot bring the ranks together over {place.address}: what listens at port {place.port} does not answer as the first host does; waited "
            f"{place.seconds} s for {place.count} hosts (TIO_RENDEZVOUS_SECONDS); is the port another program's, or is the first host's launcher stopped?"
        )
    if problems:
        raise problems[0]


def answers() -> int | None:
    """How often the store has answered this host's beats; None where it does not beat."""
    return _here[0].answers if _here else None


def leave(status: int) -> int:
    """To be called when torchrun has ended. Where the beating cannot be ended, since the store says nothing, the process is.

    Returns:
        ``status``.
    """
    if _stuck:
        ending.leave(status)
    if _here and not _here.pop().stop():  # it is inside torch: an interpreter that is taken down below it would crash
        ending.leave(status)
    return status


def why(place: Hosts, problem: BaseException) -> tuple[str, int]:
    """What keeps torchrun from bringing the hosts together, in words of ours, and the exit status: 2 where the input may be wrong, 1 where a host that had
    come is lost. torch's own words name addresses that nobody has given (10.77.0.0 for 10.77.0.1)."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError

    cause = problem.__cause__ or problem.__context__ or problem
    said = (str(cause).splitlines() or [type(cause).__name__])[0]
    late = isinstance(problem, RendezvousTimeoutError) or (isinstance(cause, dist.DistStoreError) and "timeout" in said)
    if number := re.search(r"errno: (\d+)", said):
        said = f"{place.address}:{place.port}: {os.strerror(int(number[1]))}"
    elif "imed out" in said or "timeout" in said:
        said = f"{place.address}:{place.port} does not answer"
    elif "Ping failed" in said:
        said = f"what listens at {place.address}:{place.port} does not answer as the first host does; is the port another program's?"
    if not _here:
        return said, 2
    closed = isinstance(problem, RendezvousClosedError)
    if late or closed:
        # Hosts that leave since another has given up still beat here, so that the other does not take them for lost.
        try:
            absent, lost = _here[0].absent(), _here[0].lost()
        except (dist.DistError, RuntimeError):
            return ("the other hosts have ended this run: see what they say" if closed else _STORE_LOST.format(place=place)), 1
        if absent and not closed:
            return f"{place.count - len(absent)} of {place.count} hosts have come, missing: {place.rank_by} {', '.join(map(str, absent))}", 2
        if lost:
            one = len(lost) == 1
            who, why = ("a host that had come is", "has it gone, or its launcher") if one else ("hosts that had come are", "have they gone, or their launchers")
            return f"{who} lost: {place.rank_by} {', '.join(map(str, lost))}; {why} ended?", 1
        if closed:
            return "the other hosts have ended this run: see what they say", 1
        return f"all {place.count} hosts have come, and not all of them stayed: see what the others say", 1
    if isinstance(problem, RendezvousConnectionError):
        return _STORE_LOST.format(place=place), 1
    if isinstance(problem, dist.DistNetworkError) or isinstance(cause, dist.DistNetworkError):
        return f"a host that had come is lost ({said}): is its network up?", 1
    return said, 2


def too_many(place: Hosts) -> str:
    """What is said to a host that is one too many."""
    return (
        f"this run at {place.address}:{place.port} already has its host number {place.rank} of {place.count}: "
        f"is {place.rank_by} {place.rank} given twice, or does a run from before go on there?"
    )


def limit_redundant_hosts() -> Callable[[], bool]:
    """From now on a torchrun in this process that is one too many waits no longer than it was told to. Wraps ``_RendezvousJoinOp`` of torch 2.13.

    Returns:
        Whether that has happened.

    Raises:
        RuntimeError: torch has no such class.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    join, action = getattr(dynamic_rendezvous, "_RendezvousJoinOp", None), getattr(dynamic_rendezvous, "_Action", None)
    if join is None or not hasattr(action, "ERROR_TIMEOUT"):
        raise RuntimeError(f"torch {torch.__version__}: dynamic_rendezvous has no _RendezvousJoinOp; 2.13.0 has, and would let a host too many wait for ever")
    stock, found = join.__call__, threading.Event()

    def limited(self: Any, context: Any, deadline: float) -> Any:
        if not context.state.closed and context.node in context.state.redundancy_list and time.monotonic() > deadline:
            found.set()
            return action.ERROR_TIMEOUT
        return stock(self, context, deadline)

    join.__call__ = limited
    return found.is_set


def _find(place: Hosts) -> None:
    """Wait for the port of the first host; torch itself would name addresses that nobody has, and wait longer than it is told."""
    began = time.monotonic()
    while True:
        left = began + place.seconds - time.monotonic()
        try:
            socket.create_connection((place.address, place.port), timeout=max(0.1, min(5.0, left))).close()
            return
        except OSError as error:
            if time.monotonic() - began >= place.seconds - 0.2:
                why = error.strerror or ("no answer" if isinstance(error, TimeoutError) else str(error))
                raise Refused(
                    f"torchrun cannot bring the ranks together over {place.address}: the first host does not answer at port {place.port} ({why}); waited "
                    f"{place.seconds} s for {place.count} hosts (TIO_RENDEZVOUS_SECONDS); is it started, and are MASTER_ADDR and MASTER_PORT the same there?"
                ) from error
        time.sleep(min(0.2, max(0.0, left)))
