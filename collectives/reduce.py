"""fp32 sums between ranks, in the order of :class:`~tio_megatron.contract.ReductionTree`, whatever moves the bytes.

``S`` bytes of input on each of ``P`` ranks. Bytes sent per rank and scratch held during the call, besides the result:

============  =====================================================  ============================
schedule      bytes sent                                             scratch
============  =====================================================  ============================
``doubling``  ``S log2 P`` for P a power of two                      ``S``, ``2 S`` from P = 3 on
``scatter``   ``2 S (P-1) / P``                                      ``S``
``ring``      ``S (P-1 + N) / P``, N the nodes carried               ``S / P`` per node held
============  =====================================================  ============================

Pieces are whole elements, so ``S / P`` is rounded up. For other P ``doubling`` makes an upper half of c ranks serve d lower ones, up to
``ceil(d / c)`` messages each, and what goes to several ranks is packed first, by ``scatter`` too. A vendor's ring carries N = P-1 nodes over
its hops; a fixed order carries more, never above ``2 log2 P`` in one hop: N is 1, 3, 5 and 18 at P = 2, 3, 4 and 8 for the busiest rank, and
1, 3, 4 and 6 nodes are held. :func:`tio_megatron.collectives.explain` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.collectives import plan, program, scratch, wire
from tio_megatron.collectives.choose import check_agreement, check_rows, check_sum, schedule_for
from tio_megatron.contract import Node, ReductionTree


def all_reduce(
    x: torch.Tensor, group: wire.Group, *, out_dtype: torch.dtype | None = None, schedule: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of ``x`` over the ranks by ``ReductionTree(P)``, rank ``r`` holding leaf ``r``.

    Args:
        x: fp32, any shape and strides, the same shape on every rank; left as it is.
        group: a process group, or None for one rank alone.
        out_dtype: rounds once, at the root. Default fp32.
        schedule: ``auto``, ``doubling``, ``scatter`` or ``ring``: changes time, never bytes. The same on every rank.
        out: contiguous, where the result goes; may be ``x`` itself.

    Returns:
        The sum, of ``x``'s shape. For one rank alone ``x`` itself, not a copy, unless it must be rounded.

    Raises:
        ValueError: ``x`` is not fp32, an unknown schedule, an ``out`` that does not fit.
    """
    dtype = check_sum("all_reduce", x, out_dtype)
    if out is not None and (out.shape != x.shape or out.dtype != dtype or not out.is_contiguous() or out.device != x.device):
        wanted = f"contiguous {dtype} of shape {tuple(x.shape)} on {x.device}"
        raise ValueError(f"all_reduce: out must be {wanted}, got {out.dtype} of {tuple(out.shape)}, strides {out.stride()}, on {out.device}")
    rank, size = wire.place(group)
    if size == 1:
        return x.to(dtype) if out is None else out.copy_(x)
    schedule = schedule_for(schedule, x.nbytes, size)
    check_agreement("all_reduce", group, {"shape": tuple(x.shape), "out_dtype": dtype, "schedule": schedule})
    with torch.no_grad():
        result = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
        _run("all_reduce", schedule, plan.rank_order(size), size, x.contiguous().view(1, -1), result.view(-1), None, rank, group)
    return result


def all_reduce_nodes(
    x: torch.Tensor, spans: Sequence[Sequence[Node]], tree: ReductionTree, group: wire.Group, *, out_dtype: torch.dtype | None = None, schedule: str = "auto"
) -> torch.Tensor:
    """The root of ``tree`` from the partial sums of all ranks, where a rank holds any nodes of it: uneven runs of leaves, or none.

    Only the nodes travel. A rank with no node sends nothing and receives the result.

    Args:
        x: fp32 ``[F, ...]``, one row per node in ``spans[rank]``; the trailing shape is the same on every rank.
        spans: the nodes of every rank (usually ``tree.frontier(lo, hi)``), the same on every rank.
        tree: the tree the nodes belong to.
        group: a process group, or None for one rank alone.
        out_dtype: as in :func:`all_reduce`.
        schedule: as in :func:`all_reduce`. S is the bytes of one row; bytes and scratch grow with the rows.

    Returns:
        ``[...]``. For one rank that holds the root alone, a view of ``x``.

    Raises:
        ValueError: ``x`` is not fp32, rows do not match the nodes, the nodes overlap or leave leaves out.
    """
    dtype = check_sum("all_reduce_nodes", x, out_dtype)
    owned, rank, size = _owned("all_reduce_nodes", x, spans, tree, group)
    if size == 1 and x.shape[0] == 1:
        return x[0].to(dtype)
    shape = x.shape[1:]
    schedule = schedule_for(schedule, 4 * shape.numel(), size)
    if size > 1:
        check_agreement("all_reduce_nodes", group, {"shape": tuple(shape), "spans": owned, "out_dtype": dtype, "schedule": schedule})
    with torch.no_grad():
        result = torch.empty(shape, dtype=dtype, device=x.device)
        _run("all_reduce_nodes", schedule, owned, tree.leaves, x.contiguous().view(x.shape[0], shape.numel()), result.view(-1), None, rank, group)
    return result


def reduce_scatter(
    x: torch.Tensor, group: wire.Group, *, splits: Sequence[int] | None = None, out_dtype: torch.dtype | None = None, schedule: str = "auto"
) -> torch.Tensor:
    """This rank's rows of :func:`all_reduce`, with the same bytes: ``S (P-1) / P`` bytes sent per rank by ``scatter``, in one hop.

    Args:
        x: fp32 ``[rows, ...]``, the same shape on every rank.
        group: a process group, or None for one rank alone.
        splits: rows of each rank; equal by default. Zero rows are fine.
        out_dtype: as in :func:`all_reduce`.
        schedule: ``auto`` (which is ``scatter``), ``scatter`` or ``ring``.

    Returns:
        ``[rows of this rank, ...]``. For one rank alone ``x`` itself unless it must be rounded.

    Raises:
        ValueError: ``x`` is not fp32, rows do not divide or do not match ``splits``, an unknown schedule.
    """
    dtype = check_sum("reduce_scatter", x, out_dtype)
    _, size = wire.place(group)
    counts = _splits("reduce_scatter", x.shape, splits, size)
    if size == 1:
        return x.to(dtype)
    return _reduce_scatter("reduce_scatter", x[None], plan.rank_order(size), size, counts, dtype, schedule, group)


def reduce_scatter_nodes(
    x: torch.Tensor,
    spans: Sequence[Sequence[Node]],
    tree: ReductionTree,
    group: wire.Group,
    *,
    splits: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    schedule: str = "auto",
) -> torch.Tensor:
    """This rank's rows of :func:`all_reduce_nodes`, with the same bytes.

    Args:
        x: fp32 ``[F, rows, ...]``, one row block per node in ``spans[rank]``.
        spans: as in :func:`all_reduce_nodes`.
        tree: as in :func:`all_reduce_nodes`.
        group: a process group, or None for one rank alone.
        splits: as in :func:`reduce_scatter`.
        out_dtype: as in :func:`all_reduce`.
        schedule: as in :func:`reduce_scatter`.

    Returns:
        ``[rows of this rank, ...]``.

    Raises:
        ValueError: as in :func:`all_reduce_nodes` and :func:`reduce_scatter`.
    """
    dtype = check_sum("reduce_scatter_nodes", x, out_dtype)
    owned, _, size = _owned("reduce_scatter_nodes", x, spans, tree, group)
    counts = _splits("reduce_scatter_nodes", x.shape[1:], splits, size)
    if size == 1:
        return all_reduce_nodes(x, spans, tree, group, out_dtype=out_dtype)
    return _reduce_scatter("reduce_scatter_nodes", x, owned, tree.leaves, counts, dtype, schedule, group)


def _owned(what: str, x: torch.Tensor, spans: Sequence[Sequence[Node]], tree: ReductionTree, group: wire.Group) -> tuple[plan.Owned, int, int]:
    rank, size = wire.place(group)
    owned = tuple(tuple(nodes) for nodes in spans)
    if len(owned) != size:
        raise ValueError(f"{what}: spans must have one entry per rank, got {len(owned)} for {size} ranks")
    if x.dim() < 1 or x.shape[0] != len(owned[rank]):
        raise ValueError(f"{what}: rank {rank} holds {len(owned[rank])} nodes ({', '.join(map(str, owned[rank]))}), but its first axis is {tuple(x.shape[:1])}")
    plan.check_owned(owned, tree.leaves)
    return owned, rank, size


def _splits(what: str, shape: torch.Size, splits: Sequence[int] | None, size: int) -> list[int]:
    if not shape:
        raise ValueError(f"{what}: needs an axis of rows to scatter, got a scalar")
    rows = shape[0]
    if splits is not None:
        return check_rows(what, "splits", splits, rows, size)
    if rows % size:
        raise ValueError(f"{what}: {rows} rows do not divide by {size} ranks; pass splits, or pad to {-(-rows // size) * size} rows")
    return [rows // size] * size


def _reduce_scatter(
    what: str, x: torch.Tensor, owned: plan.Owned, leaves: int, counts: list[int], dtype: torch.dtype, schedule: str, group: wire.Group
) -> torch.Tensor:
    rank, size = wire.place(group)
    schedule = schedule_for(schedule, 0, size, scattered=True)
    row = x.shape[2:]
    check_agreement(what, group, {"shape": tuple(x.shape[1:]), "spans": owned, "splits": counts, "out_dtype": dtype, "schedule": schedule})
    with torch.no_grad():
        result = torch.empty((counts[rank], *row), dtype=dtype, device=x.device)
        lengths = tuple(count * row.numel() for count in counts)
        _run(what, schedule, owned, leaves, x.contiguous().view(x.shape[0], sum(lengths)), result.view(-1), lengths, rank, group)
    return result


def _run(
    what: str, schedule: str, owned: plan.Owned, leaves: int, x: torch.Tensor, out: torch.Tensor, lengths: tuple[int, ...] | None, rank: int, group: wire.Group
) -> None:
    """Sum the rows of ``x`` [F, n] fp32 into ``out`` [n], or with ``lengths`` of each rank's piece, this rank's piece of it."""
    elements = x.shape[1]
    if elements:
        steps = program.compiled(schedule, owned, leaves, rank, out.dtype == torch.float32, elements, lengths)
        program.carry_out(what, steps, x.view(-1), scratch.borrow(steps.scratch, x.device), out, group)
