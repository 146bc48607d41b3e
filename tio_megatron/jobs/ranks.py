"""The ranks of a job: they come together after each of torchrun's starts, rank 0 decides, and where a rank is missing every other rank names it and ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tio_megatron.collectives import failure, last_words, store_line
from tio_megatron.jobs.problems import InputProblem, mendable

Value = TypeVar("Value")

STARTING_SECONDS = 120.0
"""How much later than others a rank may come: after a restart a rank first has to notice that another one was lost, and then to start."""
BEATS = 8
"""Signs of life of rank 0 in the time after which it is given up."""
_BEGUN = "tio_megatron/begun"
_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


class FirstRankFailed(RuntimeError):
    """Rank 0 has met an error and reports it; the other ranks only leave, with its ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"rank 0 left with status {status}")
        self.status = status


def come_together() -> tuple[Store, Store]:
    """Make the default process group, over gloo, of the ranks that torchrun has started; without torchrun of this process alone.

    torchrun (with its static rendezvous) keeps one store for all of its starts, and gloo would find there the addresses of ranks that have ended.
    So each start has its own part of the store, named by torchrun's count of restarts.

    Returns:
        The store of all starts, and this start's part of it.

    Raises:
        InputProblem: a rank has not come in time, or torchrun's variables are not whole.
    """
    limit = timedelta(seconds=failure.patience())
    if "RANK" not in os.environ:
        alone = HashStore()
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        return alone, alone
    try:
        _choose_interface()
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except (ValueError, dist.DistError) as error:
        raise InputProblem(f"the ranks cannot come together: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    store_line.limit(int(os.environ["MASTER_PORT"]), limit.total_seconds())  # no answer of the store is waited for longer, were its cable pulled
    own = PrefixStore(f"tio_megatron/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    everyone, patience = [f"come/{other}" for other in range(size)], failure.seconds() + STARTING_SECONDS
    own.set(everyone[rank], "1")
    try:
        own.wait(everyone, timedelta(seconds=patience))
    except dist.DistStoreError as error:
        absent = ", ".join(str(other) for other, key in enumerate(everyone) if not own.check([key]))
        raise InputProblem(f"the ranks cannot come together: rank {absent} of {size} has not come within {patience:g} s") from error
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=limit)
    return store, own


class Ranks:
    """The default process group and who is in it. Without torchrun it is one rank.

    Raises:
        InputProblem: the ranks cannot come together.
    """

    def __init__(self) -> None:
        self._all_starts, self._store = come_together()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._patience, self._calls = failure.patience(), itertools.count()
        last_words.session()  # where this rank runs, should it be missed before its first collective

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank. It may take as long as it likes; an error there ends every rank.

        Raises:
            FirstRankFailed: on the other ranks, when ``make`` raised on rank 0; there the error is raised as it is.
            CollectiveError: a rank is missing; names it.
        """
        held: list[Any] = [None, None]
        problem: Exception | None = None
        call = f"tio_megatron/alone/{next(self._calls)}"
        if self.first:
            try:
                with self._beating(call):
                    held = [make(), None]
            except Exception as error:  # a signal is not passed on: it has reached the others too
                held, problem = [None, 2 if mendable(error) else 1], error
        if self.size > 1:
            with failure.Call("what rank 0 made alone", dist.group.WORLD, lambda number: ("", () if self.first else (0,))):
                if not self.first:
                    self._wait(call)
                dist.broadcast_object_list(held)
        if problem is not None:
            raise problem
        if held[1] is not None:
            raise FirstRankFailed(held[1])
        value: Value = held[0]
        return value

    def on_first(self, make: Callable[[], Value]) -> Value | None:
        """Like :meth:`from_first` for what cannot travel: the others get None."""
        kept: list[Value] = []
        self.from_first(lambda: kept.append(make()))
        return kept[0] if kept else None

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

    @property
    def begun(self) -> bool:
        """Whether an earlier start of the same torchrun (``--max-restarts``) had called :meth:`begin`: what lies in the job's folder is then its own."""
        return self._all_starts.check([_BEGUN])

    def begin(self) -> None:
        """Rank 0 calls it where the work begins that a restart shall go on with."""
        self._all_starts.set(_BEGUN, "1")

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _beating(self, call: str) -> Iterator[None]:
        """Rank 0 at work alone, perhaps for hours: the others wait as long as they see it beat, a number in the store, and afterwards go on."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # no store, no others: they say so themselves
                for number in itertools.count():
                    self._store.set(f"{call}/beat", str(number))
                    if over.wait(min(1.0, self._patience / BEATS)):
                        return

        thread = threading.Thread(target=beat, daemon=True, name="rank 0 beats")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._store.set(f"{call}/done", "1")

    def _wait(self, call: str) -> None:
        """Until rank 0 is done.

        Raises:
            RuntimeError: rank 0 has not beaten for as long as a collective may take, or the store is lost.
        """
        seen, since = b"", time.monotonic()
        while not self._store.check([f"{call}/done"]):
            beat = self._store.get(f"{call}/beat") if self._store.check([f"{call}/beat"]) else b""
            if beat != seen:
                seen, since = beat, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise RuntimeError(f"Timed out waiting {self._patience:.0f} s for a sign of life")
            time.sleep(0.02)


def _choose_interface() -> None:
    """Tell gloo its interface, unless somebody has: left alone it takes that of the host's name, which not every machine resolves."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    name = _interface_to("127.0.0.1" if one_host else os.environ.get("MASTER_ADDR", ""))
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_to(address: str) -> str | None:
    """The name of this host's interface on the way to an IPv4 address; None where there is none. Asks the routing table, sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an IPv4 address
                    held = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16sH14x", name.encode()[:15], socket.AF_INET))
                    if socket.inet_ntoa(held[20:24]) == own:
                        return name
    except OSError:
        return None
    return None
