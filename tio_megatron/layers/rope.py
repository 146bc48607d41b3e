"""Rotary position embedding from a table; differentiable. Legend: ``S`` positions, ``B`` batch, ``T`` packed tokens, ``D`` head size."""

from __future__ import annotations

from typing import Any

import torch

from tio_megatron.kernels import rope as kernel


def packed_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[tokens]`` int64: each token's position in its own sequence. Tokens behind the last sequence count from 0 again.

    >>> packed_positions(torch.tensor([0, 2, 5]), 6).tolist()
    [0, 1, 0, 1, 2, 0]
    """
    starts = cu_seqlens.to(torch.int64)
    index = torch.arange(tokens)
    return index - starts[torch.searchsorted(starts, index, right=True) - 1]


def rope(x: torch.Tensor, table: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Rotates the halves of each head by its token's position.

    Args:
        x: ``[S, B, heads, D]``, or ``[T, heads, D]`` with ``cu_seqlens``; bf16 or fp32.
        table: ``[positions, D]`` fp32 (cosines, then sines), at least as long as the longest sequence.
        cu_seqlens: ``[sequences + 1]`` starts of packed sequences; positions restart at each.

    Raises:
        ValueError: the table is shorter than a sequence.
    """
    if cu_seqlens is None:
        positions = torch.arange(x.shape[0]).repeat_interleave(x.shape[1])
    else:
        positions = packed_positions(cu_seqlens, x.shape[0])
    longest = int(positions.max()) + 1 if positions.numel() else 0
    if longest > table.shape[0]:
        raise ValueError(f"rope: a sequence has {longest} tokens but the table holds {table.shape[0]} positions; make it from the longest sequence")
    return _Rope.apply(x, table, positions)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table, positions)
        return kernel.rope(x.reshape(positions.numel(), *x.shape[-2:]), positions, table).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        table, positions = ctx.saved_tensors
        return kernel.rope_backward(dy.reshape(positions.numel(), *dy.shape[-2:]), positions, table).view(dy.shape), None, None
