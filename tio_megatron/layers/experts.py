"""Expert networks on sorted rows, and the sum of a token's rows over the expert axis.

Shapes: ``T`` tokens, ``k`` choices, ``R`` rows, ``n`` local experts of ``E``, ``H`` hidden, ``I`` local width of one expert.
Both engines call the forward functions; the trainer's gradients are :class:`ExpertMLP`, :class:`SpreadRows` and :class:`CombineRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tio_megatron.collectives import all_reduce, all_to_all
from tio_megatron.contract import ReductionTree
from tio_megatron.kernels.combine import combine, combine_backward
from tio_megatron.kernels.grouped import PackedExperts, grouped_dgrad, grouped_linear
from tio_megatron.kernels.swiglu import swiglu, swiglu_backward
from tio_megatron.layers import grads
from tio_megatron.layers.grains import Grains, MicroBatch, cut, size
from tio_megatron.layers.permute import RowPlan, chunk_order

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
    return _down(swiglu(grouped_linear(x, w13, offsets, leaves=1)), offsets, w2, leaves, group)


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


@dataclass(frozen=True)
class RowLabels:
    """Which sample and position each row of the local experts comes from, for the sums over tokens.

    Args:
        labels: [R] int64, as :func:`tio_megatron.layers.grains.label` makes them.
        batch: the micro-batch.
        owners: [R] int64, the copy of the experts that sums each row's grain; ``None`` where no grain has rows on two copies.
    """

    labels: Tensor
    batch: MicroBatch
    owners: Tensor | None = None

    def gather(self, offsets: Tensor, operands: Sequence[Tensor]) -> tuple[Grains, Sequence[Tensor]]:
        """The grains that this rank owns, and the operands [R, ...] whose rows they number. ``offsets`` [n + 1] int64: rows of each local expert."""
        if self.owners is None:
            return cut(self.labels, self.batch.grain, offsets), operands
        group, experts = self.batch.copies, offsets.numel() - 1
        copies = size(group)
        expert = torch.arange(experts, device=offsets.device).repeat_interleave(offsets.diff(), output_size=self.owners.numel())
        leaving = torch.bincount(self.owners * experts + expert, minlength=copies * experts).view(copies, experts)
        coming = all_to_all(leaving, None, None, group)
        order = torch.argsort(self.owners, stable=True)
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
        sorted_by_expert = chunk_order(coming, sum(received))

        def move(rows: Tensor) -> Tensor:
            return all_to_all(rows[order], received, sent, group)[sorted_by_expert]

        joined = torch.cat((offsets.new_zeros(1), coming.sum(0).cumsum(0)))
        return cut(move(self.labels), self.batch.grain, joined), [move(rows) for rows in operands]


class ExpertMLP(torch.autograd.Function):
    """:func:`expert_mlp` with gradients.

    The input gradient sums over the gate-up output axis in ``dgrad_leaves`` local leaves (leaf j is gate leaf j followed by up leaf
    j) and over the group by the tree, in fp32 with one rounding, so it is complete on every rank of the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offsets: Tensor,
        leaves: int,
        dgrad_leaves: int,
        group: ProcessGroup | None,
        labels: RowLabels | None,
        *weights: Tensor,
    ) -> Tensor:
        """``weights`` are the ``w13`` of all local experts, then their ``w2``; the rest as :func:`expert_mlp` and :class:`RowLabels`.

        ``labels`` ``None`` sums all rows of an expert on this rank as one grain.
        """
        count = len(weights) // 2
        gate_up = grouped_linear(x, weights[:count], offsets, leaves=1)
        ctx.save_for_backward(x, gate_up, offsets, *weights)
        ctx.dgrad_leaves, ctx.group, ctx.labels = dgrad_leaves, group, labels
        return _down(swiglu(gate_up), offsets, weights[count:], leaves, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, offsets, *weights = ctx.saved_tensors
        count = len(weights) // 2
        dy = dy.contiguous()
        dgate_up = swiglu_backward(grouped_dgrad(dy, weights[count:], offsets, leaves=1), gate_up)
        dx = grouped_dgrad(dgate_up, weights[:count], offsets, leaves=ctx.dgrad_leaves, paired=True, out_dtype=_partial_dtype(x, ctx.group))
        dx = dx if _alone(ctx.group) else all_reduce(dx, ctx.group, out_dtype=x.dtype)
        dw: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[-len(weights) :]):
            grains, operands = Grains.whole(offsets), (dgate_up, x, dy, swiglu(gate_up))
            if ctx.labels is not None:
                grains, operands = ctx.labels.gather(offsets, operands)
            found = grads.products(weights[:count], *operands[:2], grains) + grads.products(weights[count:], *operands[2:], grains)
            dw = [one if needed else None for one, needed in zip(found, ctx.needs_input_grad[-len(weights) :], strict=True)]
        return dx, None, None, None, None, None, *dw


def _alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def _partial_dtype(x: Tensor, group: ProcessGroup | None) -> torch.dtype:
    """What a product over a cut axis is rounded to here: a partial sum stays fp32 until the ranks' are joined."""
    return x.dtype if _alone(group) else torch.float32


def _down(inner: Tensor, offsets: Tensor, w2: Weights, leaves: int, group: ProcessGroup | None) -> Tensor:
    rows = grouped_linear(inner, w2, offsets, leaves=leaves, out_dtype=_partial_dtype(inner, group))
    return rows if _alone(group) else all_reduce(rows, group, out_dtype=inner.dtype)
