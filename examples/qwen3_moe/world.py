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

from examples.qwen3_moe import ending, hosts
from tio_megatron.checkpoint import CheckpointError

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)
"""Ranks wait this long while rank 0 samples or asks other layouts."""


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
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            if "RANK" in os.environ:
                choose_interface()
                dist.init_process_group("gloo", timeout=PATIENCE)
            else:
                self._folder = tempfile.TemporaryDirectory(prefix="tio-world-")
                dist.init_process_group("gloo", init_method=f"file://{self._folder.name}/rendezvous", rank=0, world_size=1)
        except (dist.DistNetworkError, ValueError) as error:
            raise ending.InputProblem(f"the ranks cannot reach each other: {str(error).splitlines()[0]}") from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank; an error there ends every rank.

        Raises:
            FirstRankFailed: on every rank, when ``make`` raised on rank 0; it has been reported there.
        """
        held: list[Any] = [None, None]
        error: Exception | None = None
        if self.first:
            try:
                held = [make(), None]
            except Exception as caught:  # a signal is not passed on: it has reached the others too
                held, error = [None, self._tell(caught)], caught
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

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            self._folder.cleanup()


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
