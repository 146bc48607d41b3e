"""Says what a sum between ranks does, without doing it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from tio_megatron.collectives import plan, wire
from tio_megatron.collectives.choose import schedule_for, switch_bytes
from tio_megatron.collectives.program import cut
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.findings.messages import shown

MOST_RANKS = {"doubling": 1024, "scatter": 1024, "ring": 128}
"""Every rank's plan is made here to say which is the busiest: more ranks would take minutes."""


def bytes_sent(
    size: int,
    elements: int,
    *,
    schedule: str = "auto",
    out_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    scattered: bool = False,
    spans: Sequence[Sequence[Node]] | None = None,
    leaves: int | None = None,
) -> int:
    """Payload bytes one rank sends in an all-reduce of ``elements`` fp32 numbers over ``size`` ranks (``scattered``: a reduce-scatter).

    Args:
        size: ranks.
        elements: fp32 numbers per rank.
        schedule: as in :func:`~tio_megatron.collectives.all_reduce`.
        out_dtype: finished pieces travel in it.
        rank: which rank; the busiest by default.
        scattered: equal pieces stay at their owners.
        spans: nodes of every rank, as :func:`~tio_megatron.collectives.all_reduce_nodes` takes them; one leaf each by default. ``elements`` are one node's.
        leaves: of the tree that ``spans`` are nodes of.

    >>> bytes_sent(4, 1 << 20, schedule="scatter") == 2 * (4 << 20) * 3 // 4
    True
    >>> bytes_sent(4, 1 << 20, schedule="doubling") == 2 * (4 << 20)
    True
    """
    schedule = schedule_for(schedule, 4 * elements, size, scattered=scattered)
    ranks = range(size) if rank is None else (rank,)
    owned = plan.rank_order(size) if spans is None else tuple(tuple(nodes) for nodes in spans)
    plans = [plan.make(schedule, owned, size if leaves is None else leaves, r, not scattered, out_dtype == torch.float32) for r in ranks]
    return max(p.sent(cut(elements, size) if p.cut else [elements], out_dtype.itemsize) for p in plans)


def explain(
    group_or_size: wire.Group | int, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, out_dtype: torch.dtype | None = None, schedule: str = "auto"
) -> str:
    """Schedule, hops, bytes and order of ``all_reduce`` of a tensor of ``shape``, and what a vendor's ring would do instead.

    Args:
        group_or_size: a process group, None, or a number of ranks.
        shape: of the tensor on every rank.
        dtype: of the tensor; sums are fp32 only.
        out_dtype: as in :func:`~tio_megatron.collectives.all_reduce`.
        schedule: as in :func:`~tio_megatron.collectives.all_reduce`.

    Raises:
        ValueError: ``dtype`` is not fp32, an unknown schedule, a size below 1 or above :data:`MOST_RANKS`, a length that is negative or no whole number.

    >>> print(explain(4, [64, 64]))
    all_reduce of [64, 64] float32 (16.0 KiB a rank) over 4 ranks
    schedule: doubling (auto: up to 2.0 MiB doubling, above scatter)
    hops: 2
    bytes sent: at most 32.0 KiB a rank, 128.0 KiB together
    scratch: 32.0 KiB a rank besides the result
    order: ((0+1)+(2+3)) for every element, by every schedule, at every size
    a vendor's ring: piece 0 (((1+2)+3)+0), piece 1 (((2+3)+0)+1), piece 2 (((3+0)+1)+2), piece 3 (((0+1)+2)+3)
      its order moves with the piece, so with message size, number of ranks and rank
    """
    if dtype != torch.float32:
        raise ValueError(f"explain: sums between ranks are fp32 only, got {dtype}; pass out_dtype for what the root is rounded to")
    size = group_or_size if isinstance(group_or_size, int) else wire.place(group_or_size)[1]
    if size < 1:
        raise ValueError(f"explain: a group has at least one rank, got {size}")
    if isinstance(shape, str) or any(type(length) is not int for length in shape):
        raise ValueError(f"explain: a shape is a list of whole numbers, got {shown(shape)}")
    if any(length < 0 for length in shape):
        raise ValueError(f"explain: a shape has no negative length, got {list(shape)}")
    out = torch.float32 if out_dtype is None else out_dtype
    elements = math.prod(shape)
    chosen = schedule_for(schedule, 4 * elements, size)
    if size > MOST_RANKS[chosen]:
        raise ValueError(f"explain: {size} ranks; plans of {chosen} are made for up to {MOST_RANKS[chosen]}, and the order is that of ReductionTree({size})")
    plans = [plan.make(chosen, plan.rank_order(size), size, rank, True, out == torch.float32) for rank in range(size)]
    lengths = cut(elements, size) if plans[0].cut else [elements]
    sent = [p.sent(lengths, out.itemsize) for p in plans]
    why = ""
    if schedule == "auto":
        rule = "two ranks always" if size == 2 else f"up to {_size(switch_bytes())} doubling, above scatter"
        why = " (TIO_COLLECTIVE_SCHEDULE)" if os.environ.get("TIO_COLLECTIVE_SCHEDULE") else f" (auto: {rule})"
    rounded = "" if out == torch.float32 else f", rounded once to {_name(out)} at the root"
    lines = [
        f"all_reduce of {list(shape)} float32 ({_size(4 * elements)} a rank) over {size} {'rank' if size == 1 else 'ranks'}",
        f"schedule: {chosen}{why}" if size > 1 else "schedule: none, the tensor is returned as it is",
        f"hops: {max(p.hops for p in plans)}",
        f"bytes sent: at most {_size(max(sent))} a rank, {_size(sum(sent))} together",
        f"scratch: {_size(max(p.scratch(lengths, out.itemsize) for p in plans))} a rank besides the result",
        f"order: {ReductionTree(size)} for every element, by every schedule, at every size{rounded}",
    ]
    if size > 1:
        pieces = ", ".join(f"piece {p} {_walk([(p + 1 + i) % size for i in range(size)])}" for p in range(min(size, 4)))
        more = ", ..." if size > 4 else ""
        lines.append(f"a vendor's ring: {pieces}{more}")
        commute = "two terms commute: its order shows from 3 ranks on"
        lines.append("  " + (commute if size == 2 else "its order moves with the piece, so with message size, number of ranks and rank"))
    return "\n".join(lines)


def _walk(ranks: Sequence[int]) -> str:
    text = str(ranks[0])
    for rank in ranks[1:]:
        text = f"({text}+{rank})"
    return text


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
