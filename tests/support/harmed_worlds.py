"""Worlds in which one rank is killed, stopped or raises inside a collective, and how each of the others ends. For tests only.

Several worlds may be under way at once: most of their time they wait.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.collectives import CollectiveError, wire

SECONDS = 10
"""What ``TIO_COLLECTIVE_SECONDS`` is in these worlds."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its error, and what that names."""

    kind: str
    text: str
    missing: tuple[int, ...] | None


@dataclass
class World:
    """``work(rank)`` is called over and over; before the ``exchange``-th exchange of the third time, ``victim`` meets ``harm``."""

    size: int
    work: Callable[..., Any]
    victim: int
    harm: str
    exchange: int = 1
    after: float = 0.0
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tio-harmed-")
        context = multiprocessing.get_context("fork")
        for rank in range(self.size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=self._rank, args=(rank, sender), name=f"rank {rank}")
            process.start()
            sender.close()
            self.processes.append(process)
            self.pipes.append(receiver)

    def ended(self, timeout: float = 300.0) -> dict[int, Ended]:
        """How every rank but the victim ended; nobody is left then.

        Raises:
            TimeoutError: a rank still runs.
        """
        found, deadline = {}, time.monotonic() + timeout
        try:
            for rank, pipe in enumerate(self.pipes):
                if rank == self.victim and self.harm in ("kill", "stop"):
                    continue
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} still waits after {timeout:g} s")
                found[rank] = pipe.recv()
                self.processes[rank].join(60)
                assert self.processes[rank].exitcode is not None, f"rank {rank} has its error and cannot leave"
            return found
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            for pipe in self.pipes:
                pipe.close()
            self.folder.cleanup()

    def _rank(self, rank: int, pipe: Any) -> None:
        torch.set_num_threads(1)
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TIO_COLLECTIVE_SECONDS": str(SECONDS)}
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder.name}/rendezvous", rank=rank, world_size=self.size, timeout=timedelta(seconds=SECONDS)
        )
        for _ in range(2):
            self.work(rank)
        dist.barrier()
        if rank == self.victim:
            self._harm_later()
        ended = Ended("none", "", None)
        try:
            for _ in range(3):
                self.work(rank)
        except CollectiveError as error:
            ended = Ended("CollectiveError", str(error), error.missing)
        except Exception as error:
            ended = Ended(type(error).__name__, str(error), None)
        pipe.send(ended)
        os._exit(0)

    def _harm_later(self) -> None:
        count = 0

        def harmed() -> None:
            nonlocal count
            count += 1
            if count != self.exchange:
                return
            if self.after:  # in the middle of the bytes, not before them
                threading.Timer(self.after, self._meet).start()
            else:
                self._meet()

        def before(stock: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: (harmed(), stock(*arguments))[1]

        wire.all_to_all, wire.links = before(wire.all_to_all), before(wire.links)

    def _meet(self) -> None:
        if self.harm == "raise":
            raise MemoryError("no room for the third piece")
        os.kill(os.getpid(), signal.SIGKILL if self.harm == "kill" else signal.SIGSTOP)
