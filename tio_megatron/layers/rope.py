"""Rotary position embedding from a table; differentiable. Legend: ``S`` positions, ``B`` batch, ``T`` packed tokens, ``D`` head size."""

from __future__ import annotations

from typing import Any

import torch

from tio_megatron.kernels import rope as kernel
from tio_megatron.layers.sequences import Sequences


def rope(x: torch.Tensor, table: torch.Tensor, sequences: Sequences | None = None) -> torch.Tensor:
    """Rotates the halves of each head by its token's position.

    Args:
        x: ``[S, B, heads, D]``, or ``[T, heads, D]`` where ``sequences`` are packed; bf16 or fp32.
        table: ``[positions, D]`` fp32 (cosines, then sines), at least as long as the longest sequence.
        sequences: where the rows belong; by default whole sequences from position 0.

    Raises:
        ValueError: the table is shorter than a sequence, or the sequences do not fit the rows.
    """
    sequences = sequences or Sequences()
    _, positions = sequences.rows(x.shape[0], x.shape[1] if sequences.starts is None else 1)
    longest = int(positions.max()) + 1 if positions.numel() else 0
    if longest > table.shape[0]:
        raise ValueError(f"rope: a sequence has {longest} tokens but the table holds {table.shape[0]} positions; make it from the longest sequence")
    return _Rope.apply(x, table.to(x.device), positions.to(x.device))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table, positions)
        return kernel.rope(x.reshape(positions.numel(), *x.shape[-2:]), positions, table).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        table, positions = ctx.saved_tensors
        return kernel.rope_backward(dy.reshape(positions.numel(), *dy.shape[-2:]), positions, table).view(dy.shape), None, None
