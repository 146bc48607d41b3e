"""Products whose weight is cut over a group: by output columns, or by input rows.

Legend: ``T`` tokens of this rank (``S`` of the whole sequence dimension under sequence parallelism), ``K`` inputs, ``N`` outputs, ``P`` ranks.
Under sequence parallelism dimension 0 of the activations outside is cut into ``P`` equal slices, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tio_megatron import collectives
from tio_megatron.kernels import linear as kernel
from tio_megatron.layers import grads
from tio_megatron.layers.grains import Group, MicroBatch, size


def column_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: Group = None,
    sequence_parallel: bool = False,
    leaves: int = 1,
    dgrad_leaves: int = 1,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    batch: MicroBatch | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with the outputs cut over ``group``; differentiable. Nothing is reduced forward.

    Args:
        x: ``[T, ..., K]`` bf16 or fp32; under sequence parallelism this rank's slice of dimension 0.
        weight: ``[N / P, K]``, this rank's rows, same dtype.
        group: the ranks that hold the other rows.
        sequence_parallel: gather ``x`` first, scatter its gradient.
        leaves: leaves of the input axis; above 1 where another layout may cut that axis of the same weight.
        dgrad_leaves: leaves of the output axis that this rank holds, for the input gradient.
        gated: the rows are ``[gate; up]``; leaf ``j`` of the input gradient is gate leaf ``j`` followed by up leaf ``j``.
        out_dtype: defaults to the dtype of ``x``.
        batch: the grains of the weight's gradient; ``None`` sums all rows of this rank as one.

    Returns:
        ``[S, ..., N / P]``.

    Raises:
        ValueError: the dtypes differ; from the kernel, for shapes or dtypes that do not fit.
    """
    _check_alike("column_parallel", x, weight)
    return _Column.apply(x, weight, _How(group, sequence_parallel, leaves, dgrad_leaves, batch, gated, out_dtype or x.dtype))


def row_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    leaves: int,
    dgrad_leaves: int = 1,
    group: Group = None,
    sequence_parallel: bool = False,
    batch: MicroBatch | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with the inputs cut over ``group``; differentiable. The tree over all leaves of all ranks, then one rounding.

    Args:
        x: ``[S, ..., K / P]`` bf16 or fp32, this rank's inputs.
        weight: ``[N, K / P]``, this rank's columns, same dtype.
        leaves: leaves of the input axis that this rank holds.
        dgrad_leaves: leaves of the output axis, for the input gradient; above 1 where another layout may cut that axis of the same weight.
        group: the ranks that hold the other columns.
        sequence_parallel: keep only this rank's slice of dimension 0.
        batch: as in :func:`column_parallel`.

    Returns:
        ``[T, ..., N]`` in the dtype of ``x``.

    Raises:
        ValueError: the dtypes differ; from the kernel, for shapes or dtypes that do not fit.
    """
    _check_alike("row_parallel", x, weight)
    return _Row.apply(x, weight, _How(group, sequence_parallel, leaves, dgrad_leaves, batch))


def _check_alike(what: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """A weight in another dtype than the activations would be another product in each layout that casts one of them."""
    if x.dtype != weight.dtype:
        raise ValueError(f"{what}: x is {x.dtype} but the weight is {weight.dtype}; keep both in one dtype, such as x.to({weight.dtype})")


def partial_dtype(group: Group, dtype: torch.dtype) -> torch.dtype:
    """fp32 for a sum that other ranks complete; one rank alone holds the root and may round at once."""
    return dtype if size(group) == 1 else torch.float32


def reduce_partial(partial: torch.Tensor, group: Group, sequence_parallel: bool, dtype: torch.dtype) -> torch.Tensor:
    """Joins fp32 partial sums ``[S, ...]`` of the ranks by the tree and rounds once; under sequence parallelism keeps this rank's slice."""
    if size(group) == 1:
        return partial.to(dtype)
    if sequence_parallel:
        return collectives.reduce_scatter(partial.contiguous(), group, out_dtype=dtype)
    return collectives.all_reduce(partial.contiguous(), group, out_dtype=dtype)


def gathered(x: torch.Tensor, group: Group, sequence_parallel: bool) -> torch.Tensor:
    """The whole of dimension 0 from the ranks' slices."""
    return collectives.all_gather(x.contiguous(), group) if sequence_parallel and size(group) > 1 else x


def weight_grad(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, batch: MicroBatch | None) -> torch.Tensor | None:
    """Hands over the gradient of ``weight`` ``[N, K]`` from ``dy`` ``[S, ..., N]`` and ``x`` ``[S, ..., K]``, fp32 inside a grain."""
    left, right = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if batch is None:
        return grads.products([weight], left, right, grads.first_rows(len(left)))[0]
    grains, cut = batch.product(dy.shape[0], left.shape[0] // max(dy.shape[0], 1))
    if cut:
        left, right = batch.gather_product(left), batch.gather_product(right)
    return grads.products([weight], left, right, grains)[0]


@dataclass(frozen=True)
class _How:
    """Of a product everything but its numbers; the fields are arguments of :func:`column_parallel`."""

    group: Group
    sequence_parallel: bool
    leaves: int
    dgrad_leaves: int
    batch: MicroBatch | None
    gated: bool = False
    out_dtype: torch.dtype | None = None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: _How) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return kernel.linear(gathered(x, how.group, how.sequence_parallel), weight, leaves=how.leaves, out_dtype=how.out_dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), how = ctx.saved_tensors, ctx.how
        dx = dw = None
        if ctx.needs_input_grad[0]:
            rows = dy.reshape(-1, dy.shape[-1])
            partial = kernel.matmul(rows, weight.t(), leaves=how.dgrad_leaves, paired=how.gated, out_dtype=partial_dtype(how.group, x.dtype))
            dx = reduce_partial(partial.view(*dy.shape[:-1], weight.shape[1]), how.group, how.sequence_parallel, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = weight_grad(weight, dy, gathered(x, how.group, how.sequence_parallel), how.batch)
        return dx, dw, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, how: _How) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        partial = kernel.linear(x, weight, leaves=how.leaves, out_dtype=partial_dtype(how.group, x.dtype))
        return reduce_partial(partial, how.group, how.sequence_parallel, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), how = ctx.saved_tensors, ctx.how
        dy = gathered(dy, how.group, how.sequence_parallel)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = kernel.matmul(dy.reshape(-1, dy.shape[-1]), weight.t(), leaves=how.dgrad_leaves, out_dtype=x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = weight_grad(weight, dy, x, how.batch)
        return dx, dw, None
