"""Exact sums: the true sum of floating-point numbers, rounded once. Any order, any split over micro-batches and ranks gives the same bytes.

A finite float64 is a whole number of 2^-1074 with 2098 bits, so a sum is a whole number too. It is held in limbs of 32 bits, each an int64 of
its own: carries wait in the upper half, limbs are added like any integers, and integers have no order. Every fp32 number and every
product of two is a float64, so sums of squares are exact as well.

>>> import torch
>>> x = torch.tensor([1e20, 1.0, -1e20, 1.0])
>>> ExactSum.of(x).values(), ExactSum.of(x.flip(0)).values()
(tensor([2.]), tensor([2.]))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from tio_megatron import collectives
from tio_megatron.layers.grains import Group

LIMB = 32
"""Bits of a limb."""
LOWEST = -1074
"""The exponent of one count of limb 0: that of the smallest float64."""
LIMBS = -(-2098 // LIMB) + 1
COUNT, NAN, POSITIVE, NEGATIVE = range(LIMBS, LIMBS + 4)
"""Columns behind the limbs: how many terms, and how many of them are NaN, inf and -inf."""
MOST = 1 << 29
"""Terms that surely do not overflow a limb: each adds less than 2^33 to it."""


@dataclass(frozen=True)
class ExactSum:
    """``G`` sums side by side. ``state`` is ``[G, columns]`` int64; states of parts of the terms are added to give that of all."""

    state: Tensor

    @staticmethod
    def of(x: Tensor, index: Tensor | None = None, groups: int = 1) -> ExactSum:
        """Sums of the elements of ``x``.

        Args:
            x: floating point, any shape.
            index: int64 of that shape, the sum each element belongs to; -1 leaves it out. Default: all to sum 0.
            groups: ``G``.

        Raises:
            ValueError: not floating point, an index of another shape or outside -1 .. ``G`` - 1.
        """
        if not x.is_floating_point():
            raise ValueError(f"exact sum: floating point only, got {x.dtype}")
        values, where = x.detach().reshape(-1), torch.zeros(x.numel(), dtype=torch.int64, device=x.device)
        if index is not None:
            if index.shape != x.shape or index.dtype != torch.int64:
                raise ValueError(f"exact sum: index must be int64 of shape {list(x.shape)}, got {index.dtype} of {list(index.shape)}")
            check_index("exact sum", index, groups)
            where = index.reshape(-1)
            values, where = values[where >= 0], where[where >= 0]
        state = torch.zeros(groups, NEGATIVE + 1, dtype=torch.int64, device=x.device)
        _add(state.view(-1), values.double(), where * state.shape[1])
        return ExactSum(state)._checked()

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.state + other.state)._checked()

    def over(self, group: Group) -> ExactSum:
        """The sums over the terms of all ranks of ``group``."""
        return ExactSum(collectives.all_gather(self.state[None], group).sum(0))._checked()

    def counts(self) -> Tensor:
        """``[G]`` int64: terms of each sum."""
        return self.state[:, COUNT].clone()

    def exact(self) -> list[Fraction | float]:
        """The sums as fractions; NaN and infinities as they follow from the terms."""
        return [_number(row) for row in self.state.tolist()]

    def values(self) -> Tensor:
        """``[G]`` fp32, rounded once. A sum without terms is +0."""
        return rounded(self.exact())

    def means(self) -> Tensor:
        """``[G]`` fp32: sum / count, rounded once. NaN without terms."""
        return rounded([total / count if count else math.nan for total, count in zip(self.exact(), self.counts().tolist(), strict=True)])

    def _checked(self) -> ExactSum:
        if self.state.shape[0] and int(self.state[:, COUNT].max()) > MOST:
            raise ValueError(f"exact sum: more than {MOST} terms in one sum")
        return self


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of ``G`` sets of fp32 numbers, each rounded once from the exact value."""

    sums: ExactSum
    squares: ExactSum

    @staticmethod
    def of(x: Tensor, index: Tensor | None = None, groups: int = 1) -> Moments:
        """Moments of the elements of ``x`` fp32; ``index`` and ``groups`` as in :meth:`ExactSum.of`.

        Raises:
            ValueError: not fp32 (the square of a longer number is not exact).
        """
        if x.dtype != torch.float32:
            raise ValueError(f"moments: x must be torch.float32, got {x.dtype}")
        return Moments(ExactSum.of(x, index, groups), ExactSum.of(x.detach().double().square(), index, groups))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.sums + other.sums, self.squares + other.squares)

    def over(self, group: Group) -> Moments:
        """The moments of the numbers of all ranks of ``group``."""
        return Moments(self.sums.over(group), self.squares.over(group))

    def counts(self) -> Tensor:
        """``[G]`` int64."""
        return self.sums.counts()

    def means(self) -> Tensor:
        """``[G]`` fp32."""
        return self.sums.means()

    def variances(self, unbiased: bool = True) -> Tensor:
        """``[G]`` fp32: sum of (x - mean)^2 over n - 1, or over n. 0 for a single number."""
        return rounded(self._variances(unbiased))

    def deviations(self, unbiased: bool = True, epsilon: float = 0.0) -> Tensor:
        """``[G]`` fp32: sqrt(variance + epsilon), taken in float64 and rounded once more."""
        return rounded([math.sqrt(float(v) + epsilon) if v >= 0 else math.nan for v in self._variances(unbiased)])

    def _variances(self, unbiased: bool) -> list[Fraction | float]:
        found: list[Fraction | float] = []
        for total, square, n in zip(self.sums.exact(), self.squares.exact(), self.counts().tolist(), strict=True):
            if not n or not isinstance(total, Fraction):
                found.append(math.nan)
            else:
                found.append((square - total * total / n) / max(n - 1 if unbiased else n, 1))
        return found


def check_index(what: str, index: Tensor, groups: int) -> None:
    """Refuse an index outside -1 .. ``groups`` - 1.

    Raises:
        ValueError: says where it runs.
    """
    if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < groups:
        raise ValueError(f"{what}: index runs from {int(index.min())} to {int(index.max())}; it must stay between -1 and {groups - 1}")


def rounded(values: list[Fraction | float]) -> Tensor:
    """fp32 nearest to each, ties to even: by way of float64 rounded to odd, so that the second rounding sees what the first one lost."""
    return torch.tensor([_to_odd(v) if isinstance(v, Fraction) else v for v in values], dtype=torch.float64).float()


def _to_odd(value: Fraction) -> float:
    try:
        near = float(value)
    except OverflowError:
        return math.copysign(math.inf, value)
    error = value - Fraction(near)
    if not error or int(math.frexp(near)[0] * 2**53) & 1:
        return near
    return math.nextafter(near, math.copysign(math.inf, error))


def _add(state: Tensor, x: Tensor, row: Tensor) -> None:
    """Adds each of ``x`` float64 to the limbs that start at its ``row`` of the flat ``state``."""
    bits = x.view(torch.int64)
    exponent, low = (bits >> 52) & 0x7FF, bits & 0xFFFFFFFF
    finite = exponent != 0x7FF
    high = (bits >> 32) & 0xFFFFF | torch.where(exponent > 0, 1 << 20, 0)
    shift = exponent.clamp(min=1) - 1
    sign = torch.where(finite, torch.where(bits < 0, -1, 1), 0)
    at, inside = row + torch.where(finite, shift // LIMB, 0), shift % LIMB
    low, high = low << inside, high << inside  # less than 2^63 and 2^52
    mask = (1 << LIMB) - 1
    for place, part in enumerate((low & mask, (low >> LIMB) + (high & mask), high >> LIMB)):
        state.index_add_(0, at + place, sign * part)
    state.index_add_(0, row + COUNT, torch.ones_like(bits))
    for column, there in ((NAN, x.isnan()), (POSITIVE, x == math.inf), (NEGATIVE, x == -math.inf)):
        state.index_add_(0, row + column, there.to(torch.int64))


def _number(row: list[int]) -> Fraction | float:
    if row[NAN] or (row[POSITIVE] and row[NEGATIVE]):
        return math.nan
    if row[POSITIVE] or row[NEGATIVE]:
        return math.inf if row[POSITIVE] else -math.inf
    whole = 0
    for limb in reversed(row[:LIMBS]):
        whole = (whole << LIMB) + limb
    return Fraction(whole, 1 << -LOWEST)
