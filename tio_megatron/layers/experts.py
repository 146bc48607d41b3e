"""Expert networks on sorted rows, and the sum of a token's rows over the expert axis.

Shapes: ``T`` tokens, ``k`` choices, ``R`` rows, ``n`` local experts of ``E``, ``H`` hidden, ``I`` local width of one expert.
Both engines call the forward functions; the trainer's gradients are :class:`ExpertMLP`, :class:`SpreadRows` and :class:`CombineRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tio_megatron.collectives import all_reduce
from tio_megatron.contract import ReductionTree
from tio_megatron.kernels.combine import combine, combine_backward
from tio_megatron.kernels.grouped import PackedExperts, grouped_linear
from tio_megatron.kernels.linear import matmul
from tio_megatron.kernels.swiglu import swiglu, swiglu_backward
from tio_megatron.layers.grads import deliver
from tio_megatron.layers.permute import RowPlan

Weights = PackedExperts | Sequence[Tensor] | Tensor
"""The same projection of ``n`` experts: packed, a list of [N, K], or one [n, N, K]."""


def expert_mlp(x: Tensor, offsets: Tensor, w13: Weights, w2: Weights, *, leaves: int, group: ProcessGroup | None = None) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` of the expert each row belongs to; each row rounded once to the dtype of ``x``.

    Args:
        x: [R, H], rows sorted by expert.
        offsets: [n + 1] int64, the rows of each expert; an expert may have none.
        w13: [2 * I, H] of each expert, gate rows first.
        w2: [H, I] of each expert.
        leaves: leaves of the down-projection's K axis that this rank holds.
        group: the expert-tensor-parallel group over which ``I`` is cut. All its ranks hold the same rows.

    Returns:
        [R, H], complete on every rank of the group.
    """
    inner = swiglu(grouped_linear(x, w13, offsets, leaves=1))
    if group is None or group.size() == 1:
        return grouped_linear(inner, w2, offsets, leaves=leaves, out_dtype=x.dtype)
    return all_reduce(grouped_linear(inner, w2, offsets, leaves=leaves, out_dtype=torch.float32), group, out_dtype=x.dtype)


def expert_nodes(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, *, experts: int, lo: int, hi: int) -> Tensor:
    """What a rank with the experts ``[lo, hi)`` knows of each token's sum: the nodes of that run, absent ones filled with -0.

    Args:
        rows: [R, H], rounded expert outputs.
        index: [T, k] int64, the row of each choice, -1 where it is not here.
        ids: [T, k] int64, ascending in each token.
        probs: [T, k] fp32, or None for a plain sum of rows.
        experts: E.
        lo: first expert of the run.
        hi: one past the last expert of the run.

    Returns:
        [F, T, H] fp32, one for each node of ``ReductionTree(E).frontier(lo, hi)``.
    """
    return combine(rows, index, ids, probs, experts=experts, nodes=ReductionTree(experts).frontier(lo, hi))


def finish_sum(root: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The root of each token's sum, rounded once. A token that chose no expert (padding) gets +0.

    Args:
        root: [T, H] fp32.
        ids: [T, k] int64; -1 for a padding token.
    """
    return root.masked_fill((ids < 0).all(dim=1, keepdim=True), 0.0).to(dtype)


def combine_rows(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, *, experts: int) -> Tensor:
    """The whole sum of each token, on the rank that holds all its rows: [T, H] in the dtype of ``rows``, one rounding.

    Arguments as :func:`expert_nodes`.
    """
    return finish_sum(expert_nodes(rows, index, ids, probs, experts=experts, lo=0, hi=experts)[0], ids, rows.dtype)


class SpreadRows(torch.autograd.Function):
    """``x[plan.token]`` for a plan of all experts; the gradient of a token is the sum of its rows' by the expert tree, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RowPlan, ids: Tensor, experts: int) -> Tensor:
        """``x`` [T, H], ``ids`` [T, k] -> [R, H]."""
        ctx.save_for_backward(plan.index, ids)
        ctx.experts = experts
        return x.index_select(0, plan.token)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        index, ids = ctx.saved_tensors
        return combine_rows(drows.contiguous(), index, ids, None, experts=ctx.experts), None, None, None


class CombineRows(torch.autograd.Function):
    """:func:`combine_rows` with gradients of the rows and of the probabilities."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor, index: Tensor, ids: Tensor, experts: int) -> Tensor:
        """``rows`` [R, H], ``probs`` [T, k] fp32, ``index`` and ``ids`` [T, k] -> [T, H]."""
        ctx.save_for_backward(rows, probs, index, ids)
        return combine_rows(rows, index, ids, probs, experts=experts)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, index, ids = ctx.saved_tensors
        drows, dprobs = combine_backward(dout.contiguous(), rows, index, probs)
        return drows, dprobs, None, None, None


class ExpertMLP(torch.autograd.Function):
    """:func:`expert_mlp` with gradients.

    The input gradient sums over the gate-up output axis in ``dgrad_leaves`` local leaves (leaf j is gate leaf j followed by up leaf
    j) and over the group by the tree, in fp32 with one rounding, so it is complete on every rank of the group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, leaves: int, dgrad_leaves: int, group: ProcessGroup | None, *weights: Tensor) -> Tensor:
        """``weights`` are the ``w13`` of all local experts, then their ``w2``; the rest as :func:`expert_mlp`."""
        count = len(weights) // 2
        w13, w2 = weights[:count], weights[count:]
        gate_up = grouped_linear(x, w13, offsets, leaves=1)
        ctx.save_for_backward(x, gate_up, offsets, *weights)
        ctx.dgrad_leaves, ctx.group = dgrad_leaves, group
        inner = swiglu(gate_up)
        if group is None or group.size() == 1:
            return grouped_linear(inner, w2, offsets, leaves=leaves, out_dtype=x.dtype)
        return all_reduce(grouped_linear(inner, w2, offsets, leaves=leaves, out_dtype=torch.float32), group, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, offsets, *weights = ctx.saved_tensors
        count = len(weights) // 2
        w13, w2 = weights[:count], weights[count:]
        dy = dy.contiguous()
        bounds = offsets.tolist()
        inner = swiglu(gate_up)
        dinner = torch.empty_like(inner)
        for e, (lo, hi) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            dinner[lo:hi] = matmul(dy[lo:hi], w2[e].t(), out_dtype=dy.dtype)
        dgate_up = swiglu_backward(dinner, gate_up)
        partial = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        grads: list[Tensor | None] = []
        for e, (lo, hi) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            d = interleave_gate_up(dgate_up[lo:hi], ctx.dgrad_leaves)
            w = interleave_gate_up(w13[e].t(), ctx.dgrad_leaves)
            partial[lo:hi] = matmul(d, w, leaves=ctx.dgrad_leaves)
            grads.append(deliver(w13[e], matmul(dgate_up[lo:hi].t(), x[lo:hi].t())))
        for e, (lo, hi) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            grads.append(deliver(w2[e], matmul(dy[lo:hi].t(), inner[lo:hi].t())))
        dx = partial.to(x.dtype) if ctx.group is None or ctx.group.size() == 1 else all_reduce(partial, ctx.group, out_dtype=x.dtype)
        return dx, None, None, None, None, *grads


def interleave_gate_up(x: Tensor, leaves: int) -> Tensor:
    """Columns ``[gate; up]`` put in the order of the leaves: gate leaf 0, up leaf 0, gate leaf 1, ... ``x`` is [..., 2 * I]."""
    if leaves == 1:
        return x
    return x.unflatten(-1, (2, leaves, -1)).transpose(-3, -2).flatten(-3)
