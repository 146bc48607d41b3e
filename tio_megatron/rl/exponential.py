"""The exponential and what is left of it near 0, differentiable, fp32, the same bits for an element wherever it stands.

``expm1(r) = e^r - 1`` and ``excess(r) = e^r - 1 - r`` lose all digits near 0 if they are computed as written (at r = 1e-3 an error of 1e-7 in e^r
is a fifth of the excess). For |r| < 1/2 both are their Taylor series, cut where the rest is below half a unit in the last place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels import math as kernel

NEAR = 0.5
TERMS = 10
"""The first term left out is r^10 / 12! of the leading one: below 2^-38 at 1/2."""


def exp(x: Tensor) -> Tensor:
    """``e^x``; exactly 1 at both zeros."""
    return _Exp.apply(x)


def expm1(r: Tensor) -> Tensor:
    """``e^r - 1``. Not differentiable."""
    return torch.where(r.abs() < NEAR, r * _series(r, 1), kernel.exp(r) - 1)


def excess(r: Tensor) -> Tensor:
    """``e^r - 1 - r``: never negative, 0 at 0."""
    return _Excess.apply(r)


def _series(r: Tensor, first: int) -> Tensor:
    """``1 / first! + r / (first + 1)! + ...`` by Horner's rule."""
    total = torch.full_like(r, 1 / math.factorial(first + TERMS - 1))
    for n in range(first + TERMS - 2, first - 1, -1):
        total = total * r + 1 / math.factorial(n)
    return total


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = kernel.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * y


class _Excess(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor) -> Tensor:
        ctx.save_for_backward(r)
        return torch.where(r.abs() < NEAR, r * r * _series(r, 2), kernel.exp(r) - 1 - r)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (r,) = ctx.saved_tensors
        return dy * expm1(r)
