"""One start of the ranks among several: torchrun's ``--max-restarts`` starts all of them again, and its store remembers the starts before.

A torchrun counts the restarts that its own host has asked for. Over several hosts these numbers need not agree, so the ranks settle a name.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousInfo

from examples.qwen3_moe import ending
from examples.qwen3_moe.children import LAUNCHER, RUN_STORE
from tio_megatron.collectives import failure, store_line

_POLL = 0.02
_LEAVING = 5.0
"""Seconds that ranks have to say what they noticed, and to end."""
_BEGUN = "tio_megatron/begun"
_held: list[Store] = []
_asks = threading.Event()


def store_at(address: str, server: socket.socket, limit: timedelta) -> Store:
    """A store that listens at ``server`` alone. Hold it: whoever in this process then makes one for the same port, as torch does, takes part in it."""
    port = int(server.getsockname()[1])
    return dist.TCPStore(address, port, None, True, limit, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach())


def keep(store: Store) -> Store:
    """Hold a store until this process ends, longer than torchrun does: ranks of other hosts may ask there who is missing."""
    _held.append(store)
    return store


def kept() -> bool:
    """Whether this process holds one."""
    return bool(_held)


def bind_torchruns_stores() -> None:
    """From now on the second store of a torchrun in this process, where the ranks meet, listens at the address that it is named by, and every round of
    the rendezvous says where it is.

    Replaces ``DynamicRendezvousHandler._create_tcp_store_server`` of torch 2.13, which listens on every interface and has no option for it. The first
    store, of the rendezvous itself, is :func:`store_at`. And wraps its ``next_rendezvous``: torch says in the first round alone where the ranks meet, so
    that a host that comes for another's would ask the round it has come to for ever, and the others wait for it.

    Raises:
        RuntimeError: torch has no such methods.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    stock = getattr(DynamicRendezvousHandler, "next_rendezvous", None)
    if stock is None or not hasattr(DynamicRendezvousHandler, "_create_tcp_store_server"):
        lacks = "_create_tcp_store_server or no next_rendezvous; 2.13.0 has, and would listen everywhere, or not take in a host that comes later"
        raise RuntimeError(f"torch {torch.__version__}: DynamicRendezvousHandler has no {lacks}")

    def listen(self: DynamicRendezvousHandler, master_addr: str, master_port: int) -> Store:
        if self._shared_tcp_store_server is not None:  # of a round before
            return self._shared_tcp_store_server
        family = socket.AF_INET6 if ":" in master_addr else socket.AF_INET
        return keep(store_at(master_addr, socket.create_server((master_addr, master_port), family=family), timedelta(seconds=300)))

    def meet(self: DynamicRendezvousHandler) -> RendezvousInfo:
        self._bootstrap_store_info = None
        with asking():
            info: RendezvousInfo = stock(self)
        return info

    DynamicRendezvousHandler._create_tcp_store_server = listen  # type: ignore[method-assign, assignment]
    DynamicRendezvousHandler.next_rendezvous = meet  # type: ignore[method-assign]


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Meanwhile this process's main thread waits for answers of the run's store alone, as while hosts come together."""
    _asks.set()
    try:
        yield
    finally:
        _asks.clear()


def asks() -> bool:
    """Whether it does."""
    return _asks.is_set()


def outlive_the_store(seconds: float) -> None:
    """From now on a torchrun in this process lets its ranks run when it has lost the store of the rendezvous, or has heard nothing of it for ``seconds``.

    torchrun only asks there whether further hosts wait to be taken in, and would end its ranks, before they can say who is missing, with an error of its
    own about the store. Ranks that need the others notice themselves, within ``TIO_COLLECTIVE_SECONDS``; one that is stopped does not, so soon after
    that torchrun ends them after all. Wraps ``DynamicRendezvousHandler.num_nodes_waiting`` of torch 2.13.

    Raises:
        RuntimeError: torch has no such method.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    stock = getattr(DynamicRendezvousHandler, "num_nodes_waiting", None)
    if stock is None:
        raise RuntimeError(f"torch {torch.__version__}: DynamicRendezvousHandler has no num_nodes_waiting; 2.13.0 has, and would end ranks with their store")
    limited: list[bool] = []
    lost: list[float] = []

    def waiting(self: DynamicRendezvousHandler) -> int:
        if not limited:
            place = store_line.address(self._store)
            limited.append(place is not None and store_line.limit(place[1], seconds) > 0)
        if lost and time.monotonic() < lost[0] + failure.seconds() + _LEAVING:
            return 0
        try:
            return int(stock(self))
        except RendezvousConnectionError:
            if lost:
                raise
            lost.append(time.monotonic())
            return 0

    DynamicRendezvousHandler.num_nodes_waiting = waiting  # type: ignore[method-assign]


def restarted_by_torchrun() -> bool:
    """Whether torchrun would start the ranks again."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def name_of_start(store: Store, rank: int, size: int, limit: timedelta) -> str:
    """A name for this start that no other has, the same on all its ranks.

    Each rank shows a word of its own; rank 0 answers every word that it sees with the name, and goes on once all have taken it. Words of ranks that
    have ended are answered too, and nobody is there to take it.

    Raises:
        DistStoreError: a rank has not come within ``limit``.
    """
    if not restarted_by_torchrun():
        return "start"
    mine, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    if rank:
        store.set(f"tio_megatron/came/{rank}", mine)
        answer = f"tio_megatron/name/{mine}"
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError("rank 0 does not answer in torchrun's store")
            time.sleep(_POLL)
        name = store.get(answer).decode()
        store.set(f"tio_megatron/took/{rank}/{mine}/{name}", "1")
        return name
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"tio_megatron/came/{other}"]):
                word = store.get(f"tio_megatron/came/{other}").decode()
                store.set(f"tio_megatron/name/{word}", mine)
                if store.check([f"tio_megatron/took/{other}/{word}/{mine}"]):
                    waiting.discard(other)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"wait timeout, keys: tio_megatron/came/{min(waiting)}")
        time.sleep(_POLL)
    return mine


def tell_ranks(address: str, port: int) -> None:
    """Tell the ranks that this process will start who it is, and where the store of the whole run is. The one they meet in is of rank 0's host, which
    need not be the first, and is another when that host was lost and has come again."""
    os.environ[LAUNCHER], os.environ[RUN_STORE] = str(os.getpid()), f"{address} {port}"


def begun(store: Store) -> bool:
    """Whether an earlier start of the same run had begun its work: then what lies in the job's folder is this run's own. ``store``: where the ranks met."""
    return restarted_by_torchrun() and _of_the_run(store, lambda run: bool(run.check([_BEGUN])))


def begin(store: Store) -> None:
    """From here on a restart goes on instead of starting anew."""
    if restarted_by_torchrun():
        _of_the_run(store, lambda run: run.set(_BEGUN, "1") is None)


def _of_the_run(store: Store, ask: Callable[[Store], bool]) -> bool:
    """What the store of the whole run answers.

    Raises:
        InputProblem: it says nothing within the limit; not in this thread, in which torch would wait for ever.
    """
    address, _, port = os.environ.get(RUN_STORE, "").partition(" ")
    if not port:
        return ask(store)
    answers, problems = list[bool](), list[BaseException]()

    def asked() -> None:
        try:
            run = dist.TCPStore(address, int(port), None, False, timedelta(seconds=failure.patience()), wait_for_workers=False)
            answers.append(ask(run))
        except BaseException as problem:  # raised again below
            problems.append(problem)

    thread = threading.Thread(target=asked, daemon=True, name="ask the store of the run")
    thread.start()
    thread.join(failure.patience())
    if problems:
        raise problems[0]
    if not answers:
        waited = f"waited {failure.patience():g} of {failure.seconds():g} s (TIO_COLLECTIVE_SECONDS)"
        raise ending.InputProblem(f"the store of the run at {address}:{port} says nothing, {waited}; is the first host's launcher stopped?")
    return answers[0]
