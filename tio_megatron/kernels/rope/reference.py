"""Rotary embedding, defined: tables from float64, halves rotated with one rounding to the activation type."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.exact import fma


def rope(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """``x[T, heads, D]``, ``positions[T]``, ``table[P, R]`` (cos | sin, R <= D): the first R of D are rotated, the others kept.

    o1 = fma(a, cos, -(b * sin)),  o2 = fma(b, cos, a * sin)  with a, b the two halves of the R; ``inverse`` negates sin.
    """
    half = table.shape[1] // 2
    cos, sin = table[positions].unsqueeze(1).split(half, -1)
    if inverse:
        sin = -sin
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    a, b = a.float(), b.float()
    first = fma(a, cos, -(b * sin))
    second = fma(b, cos, a * sin)
    return torch.cat([first.to(x.dtype), second.to(x.dtype), rest], -1)
