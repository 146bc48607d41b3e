"""Sums of squares, defined: whole numbers of ``2**-298``, added without a rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def value(x: Tensor) -> float:
    """The sum of squares of fp32 ``x``, rounded once to float64."""
    numbers = x.double().flatten().tolist()
    if any(math.isnan(number) for number in numbers):
        return math.nan
    if any(math.isinf(number) for number in numbers):
        return math.inf
    return float(sum((Fraction(number) ** 2 for number in numbers), Fraction(0)))


def scale(x: Tensor, factor: float) -> Tensor:
    """``x`` times ``factor`` rounded to fp32, rounded to fp32."""
    return (x.double() * torch.tensor(factor, dtype=torch.float32).double()).float()
