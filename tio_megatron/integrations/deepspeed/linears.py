"""Linears of a model that DeepSpeed runs: AutoTP's row and column layers, and those that nobody has cut.

Which axis AutoTP cuts is decided by names and configuration, and where there is one rank it cuts none. An order that asked which would depend on the
layout, so here every linear has leaves on both axes: ``cuts.attn_row`` or ``cuts.mlp_row``, the larger, on its inputs and ``cuts.col_dgrad`` on its
outputs. An axis that does not divide has one leaf, and may not be cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.deepspeed.state import ordered, refuse_run
from tio_megatron.integrations.deepspeed.sums import micro_batch_sum
from tio_megatron.kernels.linear import matmul
from tio_megatron.layers.linear import column_parallel, row_parallel


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Of this rank's part of a weight ``[outputs, inputs]``."""

    outputs: int
    inputs: int


def leaves_of(contract: Contract, axis: str, length: int, parts: int, where: str) -> int:
    """Leaves held by each of ``parts`` equal shards; an axis that does not divide has one, as long as nobody cuts it.

    Raises:
        ValueError: the cut does not fall on leaves; says what would work.

    >>> leaves_of(Contract(), "mlp_row", 64, 2, "down"), leaves_of(Contract(), "mlp_row", 65, 1, "down")
    (4, 1)
    """
    if parts == 1 and length % getattr(contract.cuts, axis):
        return 1
    return contract.leaves_of(axis, length, parts, where)


def leaves_for(contract: Contract, outputs: int, inputs: int, parts: tuple[int, int], where: str) -> Leaves:
    """Of a weight ``[outputs, inputs]`` cut in ``parts`` (outputs, inputs).

    Raises:
        ValueError: see :func:`leaves_of`.
    """
    row = "attn_row" if contract.cuts.attn_row > contract.cuts.mlp_row else "mlp_row"
    return Leaves(leaves_of(contract, "col_dgrad", outputs, parts[0], f"{where} (input gradient)"), leaves_of(contract, row, inputs, parts[1], where))


class OrderedLinear(nn.Linear):
    """``nn.Linear`` with the contract's products; a module gets this class where it lies, so its parameters and their names stay."""

    tio_leaves: Leaves
    tio_setting: Setting

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (stock's name)
        """``input`` [..., K] -> [..., N], bf16 or fp32 like the weight."""
        refuse_run(self.tio_setting)
        out = column_parallel(input, self.weight, leaves=self.tio_leaves.inputs, dgrad_leaves=self.tio_leaves.outputs)
        return with_bias(out, self.bias)


def is_ordered(module: nn.Module) -> bool:
    """Whether a linear, AutoTP's or one that nobody cut, hands its gradients to their sums itself."""
    return hasattr(module, "tio_leaves")


def _column(layer: Any, input: Tensor) -> Tensor:  # noqa: A002
    """``LinearLayer.forward``: the input gradient by the tree over ranks. ``tp_overlap_comm`` changes nothing: there is nothing to overlap."""
    leaves = layer.tio_leaves
    out = column_parallel(input, layer.weight, group=layer.mp_group, leaves=leaves.inputs, dgrad_leaves=leaves.outputs)
    out = with_bias(out, layer.bias)
    if layer.gather_output:
        from deepspeed.module_inject.layers import GatherFromTensorParallelRegion

        out = GatherFromTensorParallelRegion.apply(layer.mp_group, out, layer._partition_sizes)
    return out


def _row(layer: Any, input: Tensor) -> Tensor:  # noqa: A002
    """``LinearAllreduce.forward``: the sum over inputs by the tree over leaves and ranks, one rounding."""
    leaves = layer.tio_leaves
    return with_bias(row_parallel(input, layer.weight, group=layer.mp_group, leaves=leaves.inputs, dgrad_leaves=leaves.outputs), layer.bias)


def _head(layer: Any, input: Tensor) -> Tensor:  # noqa: A002
    """``LmHeadLinearAllreduce.forward`` (inference): this rank's columns of the whole input, then as a row layer."""
    return _row(layer, input.split(list(layer._partition_sizes), dim=-1)[layer.tp_index])


column_forward, row_forward, head_forward = ordered(_column), ordered(_row), ordered(_head)


def with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """``out`` [..., N] plus ``bias`` [N], one rounding; its gradient is the fp32 sum over rows, ascending, whatever N is here."""
    if bias is None:
        return out
    added: Tensor = _AddBias.apply(out, bias)
    return added


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return out + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (bias,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return dy, None
        rows = dy.reshape(-1, dy.shape[-1])
        total = matmul(rows.t(), torch.ones(1, len(rows), dtype=rows.dtype, device=rows.device)).view(-1)
        kept = micro_batch_sum(bias)
        if kept is None:
            return dy, total.to(bias.dtype)
        kept.add(total)
        return dy, None
