"""What an exact sum is kept in. No arithmetic."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SPLIT, MOST_SPLIT = 24, 50
FIRST_UNIT = -50
"""The exponent of the unit before the first step has shown how large partials are."""
UNITS = range(-256, 257)
"""Exponents of units that are served: more than fp32 partials can ask for."""


def untouched_zeros(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu") -> Tensor:
    """Zeros in memory of their own that the system hands out page by page, when a page is first written.

    Until then they cost address space only, which is why a sum may always have its ``high`` part. An accelerator has no such memory: plain zeros there.
    """
    if torch.device(device).type != "cpu" or not math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def split_for(partials: int) -> int:
    """The ``split`` with which ``partials`` partials cannot overflow either part: ``min(50, 62 - ceil(log2(partials)))``.

    Args:
        partials: how many partials one element of the global tensor gets in a step, at most.

    Raises:
        ValueError: less than 1, or more than 2^38 (then large partials would not be exact).

    >>> split_for(1), split_for(4096), split_for(4097)
    (50, 50, 49)
    """
    if not 1 <= partials <= 1 << (62 - LEAST_SPLIT):
        raise ValueError(f"integer sum: {partials} partials cannot be summed exactly in 64 bits; 1 to 2^{62 - LEAST_SPLIT} can")
    return min(MOST_SPLIT, 62 - (partials - 1).bit_length())


@dataclass(eq=False)
class IntegerSum:
    """A sum of fp32 partials in integers: ``(high * 2^(split - 24) + low) * 2^unit``. Exact after each partial's one rounding, so order is free.

    Sums of the same ``unit`` and ``split`` are added by adding ``low`` and ``high`` and taking the larger ``peak``.

    Attributes:
        low: int64; a partial below :attr:`large` adds its multiple of ``2^unit``, rounded half to even.
        high: int64, same shape; a partial from :attr:`large` on adds its exact multiple of ``2^(unit + split - 24)``.
        peak: fp32 ``[1]``, the largest |partial| so far, exact; infinity as soon as one is not finite.
        unit: exponent of one count of ``low``.
        split: see :func:`split_for`.
    """

    low: Tensor
    high: Tensor
    peak: Tensor
    unit: int = FIRST_UNIT
    split: int = MOST_SPLIT

    def __post_init__(self) -> None:
        for name, tensor, dtype, shape in (
            ("low", self.low, torch.int64, self.low.shape),
            ("high", self.high, torch.int64, self.low.shape),
            ("peak", self.peak, torch.float32, (1,)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"integer sum: {name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}")
        if self.unit not in UNITS or self.split not in range(LEAST_SPLIT, MOST_SPLIT + 1):
            raise ValueError(
                f"integer sum: unit {self.unit} and split {self.split} are not served; {UNITS[0]} to {UNITS[-1]} and {LEAST_SPLIT} to {MOST_SPLIT} are"
            )

    @classmethod
    def empty(cls, shape: tuple[int, ...] | torch.Size, unit: int = FIRST_UNIT, split: int = MOST_SPLIT, device: torch.device | str = "cpu") -> IntegerSum:
        """No partial yet. On the CPU ``high`` costs no memory until a large partial comes."""
        low, high = untouched_zeros(shape, device=device), untouched_zeros(shape, device=device)
        return cls(low, high, torch.zeros(1, dtype=torch.float32, device=device), unit, split)

    @property
    def large(self) -> float:
        """Partials of at least this magnitude go to ``high``; if ``peak`` is below it, ``high`` is zero."""
        return 2.0 ** (self.unit + self.split)

    @property
    def limit(self) -> float:
        """Partials of at least this magnitude are in neither part: the caller refuses a sum whose ``peak`` reaches it."""
        return 2.0 ** (self.unit + 2 * self.split - 24)
