"""Moves between ranks without arithmetic: any dtype, equal or uneven rows, ranks with no row included. ``P`` ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.collectives import program, wire
from tio_megatron.collectives.choose import check_agreement, check_no_grad, check_rows
from tio_megatron.collectives.failure import Call


def all_gather(x: torch.Tensor, group: wire.Group, *, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The rows of all ranks, joined along the first axis in rank order. Each rank's rows travel P-1 times; where P is not a power of
    two, P copies of them are packed for that.

    Args:
        x: ``[n, ...]``, any dtype; the trailing shape is the same on every rank.
        group: a process group, or None for one rank alone.
        sizes: rows of each rank, the same on every rank; equal by default.

    Returns:
        ``[sum of sizes, ...]``. For one rank alone ``x`` itself.

    Raises:
        ValueError: ``x`` has not the rows that ``sizes`` says.
    """
    check_no_grad("all_gather", x)
    if x.dim() < 1:
        raise ValueError("all_gather: needs an axis of rows to join along, got a scalar")
    rank, size = wire.place(group)
    counts = [x.shape[0]] * size if sizes is None else check_rows("all_gather", "sizes", sizes, None, size)
    if counts[rank] != x.shape[0]:
        raise ValueError(f"all_gather: sizes says {counts[rank]} rows for rank {rank}, it has {x.shape[0]}")
    if size == 1:
        return x
    check_agreement("all_gather", group, {"row": tuple(x.shape[1:]), "dtype": x.dtype, "sizes": counts})
    out = torch.empty((sum(counts), *x.shape[1:]), dtype=x.dtype, device=x.device)
    torch.split(out, counts)[rank].copy_(x)
    row = x.shape[1:].numel()
    flat = out.view(-1)
    program.carry_out("all_gather", program.gathering(rank, tuple(count * row for count in counts)), flat, flat, flat, group)
    return out


def all_to_all(x: torch.Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, group: wire.Group) -> torch.Tensor:
    """Each rank's rows for each other rank. Sends every row that is not this rank's own once.

    Args:
        x: ``[n, ...]``, any dtype: first the rows for rank 0, then for rank 1, ...
        out_splits: rows expected from each rank (a sequence or a tensor of whole numbers); equal to ``in_splits`` where None.
        in_splits: rows of ``x`` for each rank; equal runs where None.
        group: a process group, or None for one rank alone.

    Returns:
        ``[sum of out_splits, ...]``: first the rows from rank 0, then from rank 1, ... For one rank alone ``x`` itself.

    Raises:
        ValueError: counts do not match ``x``, or this rank's own two counts differ.
    """
    check_no_grad("all_to_all", x)
    if x.dim() < 1:
        raise ValueError("all_to_all: needs an axis of rows, got a scalar")
    rank, size = wire.place(group)
    if in_splits is None:
        if x.shape[0] % size:
            raise ValueError(f"all_to_all: {x.shape[0]} rows do not divide by {size} ranks; pass in_splits and out_splits")
        in_splits = [x.shape[0] // size] * size
    to = check_rows("all_to_all", "in_splits", in_splits, x.shape[0], size)
    expected = to if out_splits is None else check_rows("all_to_all", "out_splits", out_splits, None, size)
    if to[rank] != expected[rank]:
        raise ValueError(f"all_to_all: rank {rank} keeps {to[rank]} rows by in_splits, but {expected[rank]} by out_splits")
    if size == 1:
        return x
    check_agreement("all_to_all", group, {"row": tuple(x.shape[1:]), "dtype": x.dtype}, to, expected)
    out = torch.empty((sum(expected), *x.shape[1:]), dtype=x.dtype, device=x.device)
    row = x.shape[1:].numel()
    assert group is not None
    with Call("all_to_all", group) as call:
        wire.all_to_all(out.view(-1), [n * row for n in expected], x.contiguous().view(-1), [n * row for n in to], group, call.deadline)
    return out


def all_max(x: torch.Tensor, group: wire.Group) -> torch.Tensor:
    """The elementwise maximum over the ranks: exact, so it has no order, but for two things that are settled here.

    A NaN on any rank gives NaN, and a zero is ``+0`` (processors pick either of two zeros), for one rank alone too.

    Args:
        x: floating point, any shape, the same on every rank. Sends it to each of the P-1 others: meant for one number a row.
        group: a process group, or None for one rank alone.

    Raises:
        ValueError: ``x`` is not floating point.
    """
    if not x.is_floating_point():
        raise ValueError(f"all_max: floating point only, got {x.dtype}")
    _, size = wire.place(group)
    return all_gather(x[None], group).amax(dim=0) + 0.0 if size > 1 else x + 0.0
