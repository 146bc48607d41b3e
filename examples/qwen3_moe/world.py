"""The ranks of the main trainer: rank 0 decides and talks, all ranks follow."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from examples.qwen3_moe import ending, hosts
from examples.qwen3_moe.ending import InputProblem
from examples.qwen3_moe.pulse import Pulse
from examples.qwen3_moe.starts import begin, begun, name_of_start, store_at
from tio_megatron.checkpoint import CheckpointError
from tio_megatron.collectives import failure, last_words, store_line

Value = TypeVar("Value")
_ANSWER = 3.0
"""Seconds that a store which lives may take to answer."""


class FirstRankFailed(RuntimeError):
    """Rank 0 met an error and has reported it; every rank only leaves, with its ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"rank 0 left with status {status}")
        self.status = status


def exit_status(error: BaseException) -> int:
    """2 for what the user can mend, else 1."""
    if isinstance(error, FirstRankFailed):
        return error.status
    return 2 if isinstance(error, CheckpointError) or ending.mendable(error) else 1


class World:
    """The default process group. Without torchrun it is one rank.

    Args:
        tell: reports an error of rank 0. It is called before the other ranks hear of the error: as soon as one of them leaves, torchrun ends all.

    Raises:
        InputProblem: the ranks cannot reach each other.
    """

    def __init__(self, tell: Callable[[Exception], int] = exit_status) -> None:
        self._tell = tell
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "0") or 0)))
        self._store: Store | None = None
        try:
            if "RANK" in os.environ:
                self._store = join(timedelta(seconds=failure.patience()))
            else:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except (dist.DistError, ValueError) as error:
            raise ending.InputProblem(f"the ranks cannot come together: {_why_not(error)}", everywhere=True) from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._pulse = Pulse(failure.patience())
        last_words.session()  # where this rank runs, should it be missed before its first collective

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank; an error there ends every rank. It may take as long as it likes.

        Raises:
            FirstRankFailed: on every rank, when ``make`` raised on rank 0; it has been reported there.
            CollectiveError: a rank is missing; names it.
        """
        held: list[Any] = [None, None]
        error: Exception | None = None
        if self.first:
            try:
                with self._pulse.beating():
                    held = [make(), None]
            except Exception as caught:  # a signal is not passed on: it has reached the others too
                held, error = [None, self._tell(caught)], caught
        if self.size > 1:
            with failure.Call("what rank 0 made alone", dist.group.WORLD, lambda number: ("", () if self.first else (0,))):
                if not self.first:
                    self._pulse.wait()
                dist.broadcast_object_list(held)
        if held[1] is not None:
            raise FirstRankFailed(held[1]) from error
        value: Value = held[0]
        return value

    def on_first(self, make: Callable[[], Value]) -> Value | None:
        """Like :meth:`from_first` for what cannot travel: the others get None."""
        kept: list[Value] = []

        def keep() -> None:
            kept.append(make())

        self.from_first(keep)
        return kept[0] if kept else None

    @property
    def begun(self) -> bool:
        """Whether torchrun has started these ranks again (``--max-restarts``) after :meth:`begin` (on rank 0)."""
        return self._store is not None and begun(self._store)

    def begin(self) -> None:
        """Rank 0 calls it where the work begins that a restart shall go on with."""
        if self._store is not None:
            begin(self._store)

    def gather(self, mine: Value) -> list[Value]:
        """What every rank has, by rank, on every rank.

        Raises:
            CollectiveError: a rank is missing; names it.
        """
        everyone: list[Any] = [mine] * self.size
        if self.size > 1:
            with failure.Call("the comparison of all ranks", dist.group.WORLD):
                dist.all_gather_object(everyone, mine)
        return everyone

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(limit: timedelta) -> Store:
    """Make the default group of the ranks that were started with this one; over again after each of torchrun's restarts.

    torchrun keeps one store for all starts, and gloo would find there the addresses of ranks that have ended; so each start has its own part of it.

    Returns:
        The whole store.

    Raises:
        DistError, ValueError: a rank has not come within ``limit``, or cannot be reached.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            where = "torchrun sets both; or unset RANK, and the launch script starts the ranks itself"
            raise InputProblem(f"RANK={os.environ['RANK']} is set and {name} is not: {where}", everywhere=True)
    choose_interface()
    _find_first()
    joined = threading.Event()
    # Not in this thread: inside torch it waits for the store's word for ever.
    threading.Thread(target=_end_where_the_store_is_silent, args=(joined, limit.total_seconds()), daemon=True, name="watch the store").start()
    try:
        held = _first_listens(limit)
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        if int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size:
            store_line.limit(int(os.environ["MASTER_PORT"]), limit.total_seconds())  # no answer of the store is waited for longer, were its cable pulled
        own = dist.PrefixStore(name_of_start(store, rank, size, limit), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
        del held  # torch's own has taken its place
        return store
    finally:
        joined.set()


def _end_where_the_store_is_silent(joined: threading.Event, limit: float) -> None:
    """End this process when it has not ``joined`` within ``limit`` and the store takes connections and says nothing, as where its process is stopped."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")

    def ask() -> None:
        with contextlib.suppress(dist.DistError, ValueError):  # an answer too: the main thread has it as well
            dist.TCPStore(address, int(port), None, False, timedelta(seconds=_ANSWER), wait_for_workers=False)

    joined.wait(limit)
    while not joined.wait(1.0):
        asked = threading.Thread(target=ask, daemon=True)
        asked.start()
        asked.join(_ANSWER + 1)
        if asked.is_alive() and not joined.is_set():
            waited = f"waited {failure.patience():g} of {failure.seconds():g} s (TIO_COLLECTIVE_SECONDS)"
            line = f"error: the ranks cannot come together: the store at {address}:{port} says nothing, {waited}; is the launcher of its host stopped?"
            ending.leave(ending.say(line, 2, everywhere=True))


def _first_listens(limit: timedelta) -> Store | None:
    """Where no torchrun keeps the store rank 0 does: at the address that was named, and not, as torch would have it, on every interface.

    Raises:
        ValueError: the address is not this host's, or its port is in use.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not address or not port.isdecimal() or port == "0":
        return None
    _, server = hosts.Hosts(address=address, port=int(port)).listen()
    assert server is not None
    return store_at(address, server, limit)


def _find_first() -> None:
    """Wait for the port of rank 0, where ranks that no torchrun has brought together meet; torch itself would wait for it twice as long as it is told.

    Raises:
        DistStoreError: it did not come.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ["RANK"] == "0" or "TORCHELASTIC_RUN_ID" in os.environ or not address or not port.isdecimal():
        return
    place, deadline = (address, int(port)), time.monotonic() + failure.patience()
    while True:
        try:
            socket.create_connection(place, timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"rank 0 does not answer at {place[0]}:{place[1]} ({error.strerror or error})") from error
        time.sleep(0.1)


def _why_not(error: Exception) -> str:
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if not isinstance(error, dist.DistStoreError):
        return said
    awaited = re.search(r"keys: \S*/(\d+)$", said)  # gloo waits for the addresses of the others, in their order
    if said.startswith("rank 0"):
        who, said = "rank 0 has not come", said.partition("answer ")[2]
    else:
        who = f"rank {awaited[1]} has not come" if awaited else f"not all {os.environ.get('WORLD_SIZE', '')} ranks have come"
    return f"{who} within {failure.patience():g} of {failure.seconds():g} s (TIO_COLLECTIVE_SECONDS): {said}"


def choose_interface() -> None:
    """Tell gloo its interface, unless somebody has: left alone it takes that of the host's name, which not every machine resolves.

    Raises:
        ValueError: several hosts, and no way from here to the first.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) == os.environ["WORLD_SIZE"]:
        name = "lo" if Path("/sys/class/net/lo").exists() else None
    else:
        name = hosts.interface_of(hosts.own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
