"""The only place where bytes leave this rank, so the only place where they are counted.

Everything is point to point, given to the backend as one batch (gloo issues the messages one by one, NCCL and HCCL as one group call);
no backend ever sees an addition. Ranks are numbers inside the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
"""A process group, or None for one rank alone (not the default group)."""

Message = tuple[torch.Tensor, int]
"""A dense tensor to send or fill, and the peer's rank in the group."""

_TAG = 0x710
"""Keeps gloo from matching our messages with somebody else's in the same group; NCCL matches by order alone and ignores it."""


@dataclass
class Traffic:
    """What this rank sent while :func:`count` was active: payload bytes, messages, rounds, and bytes by peer."""

    sent: int = 0
    messages: int = 0
    rounds: int = 0
    peers: dict[int, int] = field(default_factory=dict)


_counting: list[Traffic] = []


@contextmanager
def count() -> Iterator[Traffic]:
    """Count what this process sends through this package."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def place(group: Group) -> tuple[int, int]:
    """This rank in ``group`` and the group's size; ``(0, 1)`` for None.

    Raises:
        ValueError: this process is not in the group.
    """
    if group is None:
        return 0, 1
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("collective: this process is not in the group; call it on the group's ranks only, or pass None for one rank alone")
    return rank, size


def device(group: Group) -> torch.device:
    """Where a tensor must lie for this group's backend to move it."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or dist.get_backend(group) == "gloo" else accelerator


def exchange(sends: Sequence[Message], recvs: Sequence[Message], group: Group) -> None:
    """Send and receive all messages at once and wait for them. Empty tensors are left out, so both ends must agree on sizes."""
    sends = [(t, peer) for t, peer in sends if t.numel()]
    recvs = [(t, peer) for t, peer in recvs if t.numel()]
    for traffic in _counting:
        traffic.rounds += bool(sends or recvs)
        traffic.messages += len(sends)
        for t, peer in sends:
            traffic.sent += t.nbytes
            traffic.peers[peer] = traffic.peers.get(peer, 0) + t.nbytes
    ops = [dist.P2POp(dist.isend, t, group=group, tag=_TAG, group_peer=peer) for t, peer in sends]
    ops += [dist.P2POp(dist.irecv, t, group=group, tag=_TAG, group_peer=peer) for t, peer in recvs]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
