"""What is left of the exponential near 0, fp32, the same bits for an element wherever it stands. Not differentiable.

``expm1(r) = e^r - 1`` and ``excess(r) = e^r - 1 - r`` lose all digits near 0 if they are computed as written (at r = 1e-3 an error of 1e-7 in e^r
is a fifth of the excess). For |r| < 1/2 both are their Taylor series, cut where the rest is below half a unit in the last place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tio_megatron.kernels import math as kernel

NEAR = 0.5
TERMS = 10
"""The first term left out is r^10 / 12! of the leading one: below 2^-38 at 1/2."""


def expm1(r: Tensor) -> Tensor:
    """``e^r - 1``."""
    return torch.where(r.abs() < NEAR, r * _series(r, 1), kernel.exp(r) - 1)


def excess(r: Tensor) -> Tensor:
    """``e^r - 1 - r``: never negative, 0 at 0, inf at both infinities."""
    far = torch.where(r == math.inf, r, kernel.exp(r) - 1 - r)  # inf - inf there, as written
    return torch.where(r.abs() < NEAR, r * r * _series(r, 2), far)


def _series(r: Tensor, first: int) -> Tensor:
    """``1 / first! + r / (first + 1)! + ...`` by Horner's rule."""
    total = torch.full_like(r, 1 / math.factorial(first + TERMS - 1))
    for n in range(first + TERMS - 2, first - 1, -1):
        total = total * r + 1 / math.factorial(n)
    return total
