"""The only place where bytes leave this rank, so the only place where they are counted.

Backends move bytes and never add: everything travels as ``uint8``. Messages of one round go out as one all-to-all, which gloo, NCCL and
HCCL all run in threads or streams of their own; sends posted one by one from the caller's thread were 10 times slower over gloo on a busy
machine (the caller loses its core while it holds a connection's lock, and gloo's thread spins on it). Ranks are numbers inside the group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

AnyGroup = dist.ProcessGroup

Group = AnyGroup | None
"""A process group, or None for one rank alone (not the default group)."""

Message = tuple[int, torch.Tensor]
"""The peer's rank in the group, and a dense tensor to send or fill."""

_TAG = 0x710
"""Keeps gloo from matching our messages on links with somebody else's in the same group; NCCL matches by order alone and ignores it."""
_NEVER_SENT = 0x711


@dataclass
class Traffic:
    """What this rank sent to others while :func:`count` was active: payload bytes, messages, rounds, and bytes by peer."""

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


def _count(by_peer: Sequence[int], rank: int) -> None:
    for traffic in _counting:
        traffic.rounds += 1
        for peer, nbytes in enumerate(by_peer):
            if nbytes and peer != rank:
                traffic.messages += 1
                traffic.sent += nbytes
                traffic.peers[peer] = traffic.peers.get(peer, 0) + nbytes


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


def waits(group: AnyGroup) -> bool:
    """Whether a call returns when its bytes have come; else (NCCL, HCCL) they come in a stream, and the backend's own watchdog keeps the time."""
    return bool(dist.get_backend(group) == "gloo")


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


@torch.compiler.disable(reason="bytes between ranks")  # a graph capture takes a process group's own methods for an error, not for a cut
def all_to_all(out: torch.Tensor, out_counts: Sequence[int], x: torch.Tensor, in_counts: Sequence[int], group: AnyGroup, deadline: float) -> None:
    """``in_counts[p]`` elements of the flat ``x`` to each rank p, in rank order, and ``out_counts[p]`` from each into the flat ``out``.

    ``deadline``, on :func:`time.monotonic`'s clock: gloo gives up then.
    """
    scale = x.element_size()
    sizes = [n * scale for n in in_counts]
    if _counting:
        _count(sizes, dist.get_rank(group))
    host = _by_host(out, group)
    target = torch.empty(out.shape, dtype=out.dtype, device="cpu") if host else out
    options = dist.AllToAllOptions()  # torch's function of this name has no way to say how long
    options.timeout = _left(deadline)
    work = group.alltoall_base(target.view(torch.uint8), (x.cpu() if host else x).view(torch.uint8), [n * scale for n in out_counts], sizes, options)
    if work is not None:
        work.wait()
    if host:
        out.copy_(target)


@torch.compiler.disable(reason="bytes between ranks")  # a graph capture takes a process group's own methods for an error, not for a cut
def links(sends: Sequence[Message], recvs: Sequence[Message], group: AnyGroup, deadline: float) -> None:
    """Send and receive over the links to the named peers only. Empty messages are left out at both ends. ``deadline`` as in :func:`all_to_all`."""
    sends = [(peer, t) for peer, t in sends if t.numel()]
    recvs = [(peer, t) for peer, t in recvs if t.numel()]
    if _counting:
        rank, size = place(group)
        _count([sum(t.nbytes for peer, t in sends if peer == p) for p in range(size)], rank)
    host = [torch.empty(t.shape, dtype=t.dtype, device="cpu") if _by_host(t, group) else t for _, t in recvs]
    ops = [dist.P2POp(dist.irecv, t, group=group, tag=_TAG, group_peer=peer) for (peer, _), t in zip(recvs, host, strict=True)]
    ops += [dist.P2POp(dist.isend, t.cpu() if _by_host(t, group) else t, group=group, tag=_TAG, group_peer=peer) for peer, t in sends]
    if ops:
        timed = waits(group)
        for work in dist.batch_isend_irecv(ops):
            work.wait(_left(deadline)) if timed else work.wait()
    for (_, t), received in zip(recvs, host, strict=True):
        if received is not t:
            t.copy_(received)


def hang_up(group: AnyGroup) -> None:
    """Close this rank's connections in ``group``: the others learn at once that it takes no further part, also those that wait for somebody else.

    gloo has no call for this, but closes all connections of a group when one wait has taken too long.
    """
    if not waits(group):
        return
    rank, size = place(group)
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(size):
        if peer != rank:
            try:
                group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError:  # too long, as meant; or closed already
                continue


def _by_host(tensor: torch.Tensor, group: Group) -> bool:
    """gloo moves an accelerator's bytes by way of the host: several ranks can then share one card, which NCCL and HCCL do not allow."""
    return not tensor.is_cpu and dist.get_backend(group) == "gloo"
