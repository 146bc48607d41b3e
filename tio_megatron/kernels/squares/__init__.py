"""The exact sum of squares of fp32 numbers, for a gradient's norm, and the product that clips. No order: integers are added.

A square of an fp32 number is a whole number of ``2**-298``. A sum is an int64 tensor of :data:`NUMBERS` elements: :data:`LIMBS` limbs, limb
``i`` counting units of ``2**(32 * i - 298)``, then how many of the numbers were infinite and how many NaN. A kernel leaves each limb but
the last below ``2**32``, so the sums of two billion ranks can be added limb by limb (an int64 all-reduce) before anything overflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tio_megatron.kernels.operands import check_device, check_dtype, check_shape
from tio_megatron.kernels.squares import cpu

__all__ = ["LIMBS", "NUMBERS", "UNIT", "add_squares_", "empty_sum", "root", "scale_", "value"]

LIMBS = 18
NUMBERS = LIMBS + 2
UNIT = -298
"""Limb 0 counts units of ``2**UNIT``: the square of the smallest fp32 number."""


def empty_sum(device: torch.device | str = "cpu") -> Tensor:
    """The sum of nothing, int64 ``[NUMBERS]``."""
    return torch.zeros(NUMBERS, dtype=torch.int64, device=device)


def add_squares_(total: Tensor, x: Tensor) -> None:
    """Add the square of every element of fp32 ``x``, any shape, to ``total``, exactly.

    Raises:
        ValueError: another type, shape or device.
    """
    check_dtype("add_squares_", "total", total, torch.int64)
    check_shape("add_squares_", "total", total, NUMBERS)
    check_dtype("add_squares_", "x", x, torch.float32)
    cpu.add_squares_(total, x)


def value(total: Tensor) -> float:
    """The sum, rounded once to float64 (half to even); infinity or NaN where a number was.

    >>> total = empty_sum(); add_squares_(total, torch.tensor([3.0, 4.0])); value(total), root(total)
    (25.0, 5.0)
    """
    *limbs, infinite, undefined = total.tolist()
    if undefined:
        return math.nan
    if infinite:
        return math.inf
    # Python divides whole numbers with one rounding.
    return sum(limb << (32 * i) for i, limb in enumerate(limbs)) / (1 << -UNIT)


def root(total: Tensor) -> float:
    """The square root of :func:`value`, correctly rounded to float64."""
    return math.sqrt(value(total))


def scale_(x: Tensor, factor: float) -> None:
    """Multiply fp32 ``x``, contiguous, in place by ``factor``, which is rounded to fp32 once; one rounding for each element.

    Raises:
        ValueError: another type or device, or not contiguous.
    """
    check_device("scale_", "x", x)
    check_dtype("scale_", "x", x, torch.float32)
    if not x.is_contiguous():
        raise ValueError(f"scale_: x of shape {list(x.shape)} is not contiguous")
    cpu.scale_(x, factor)
