"""The ranks of the main trainer: rank 0 decides and talks, all ranks follow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from examples.qwen3_moe.children import InputProblem
from tio_megatron.checkpoint import CheckpointError

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)
"""Ranks wait this long while rank 0 samples or asks other layouts."""


class FirstRankFailed(RuntimeError):
    """Rank 0 met an error that it reports itself; the other ranks only leave, with its ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"rank 0 left with status {status}")
        self.status = status


def exit_status(error: BaseException) -> int:
    """2 for what the user can mend, 130 for Ctrl-C, else 1."""
    if isinstance(error, FirstRankFailed):
        return error.status
    if isinstance(error, InputProblem | CheckpointError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


class World:
    """The default process group. Without torchrun it is one rank."""

    def __init__(self) -> None:
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "0") or 0)))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if "RANK" in os.environ:
            if Path("/sys/class/net/lo").exists():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", timeout=PATIENCE)
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="tio-world-")
            dist.init_process_group("gloo", init_method=f"file://{self._folder.name}/rendezvous", rank=0, world_size=1)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank; an error there ends every rank.

        Raises:
            FirstRankFailed: on the other ranks, when ``make`` raised on rank 0 (where its own error is raised).
        """
        held: list[Any] = [None, None]
        error: BaseException | None = None
        if self.first:
            try:
                held = [make(), None]
            except BaseException as caught:
                held, error = [None, exit_status(caught)], caught
        dist.broadcast_object_list(held)
        if error is not None:
            raise error
        if held[1] is not None:
            raise FirstRankFailed(held[1])
        value: Value = held[0]
        return value

    def on_first(self, make: Callable[[], Value]) -> Value | None:
        """Like :meth:`from_first` for what cannot travel: the others get None."""
        kept: list[Value] = []

        def keep() -> None:
            kept.append(make())

        self.from_first(keep)
        return kept[0] if kept else None

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()
