"""The grid on which the partial sums of a gradient are added exactly: what one count is worth, and how much fits."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """How finely a kind of gradient is resolved. Partial sums are rounded to counts and added as 64-bit integers, in any order.

    A count is worth ``2 ** (E - bits)``, where ``2 ** E`` is just above the largest partial of the steps before. Partials of ``2 ** split``
    counts or more are added exactly to a second integer whose count is ``2 ** 24`` times finer than that bound: an fp32 number that large is a
    whole multiple of it.

    Args:
        bits: counts in ``2 ** E``, as a power of two.
        split: where the second integer takes over, as a power of two of counts.
        first: the exponent of a count before any partial is known.
    """

    bits: int
    split: int
    first: int

    @property
    def capacity(self) -> int:
        """Partials of one global batch that cannot overflow either integer."""
        return int(2 ** (62 - self.split))

    def unit(self, largest: float) -> int:
        """The exponent of a count when ``largest`` is the largest partial known (0: none yet).

        >>> PRODUCTS.unit(1.0), PRODUCTS.unit(0.99), PRODUCTS.unit(0.0)
        (-37, -38, -40)
        """
        return math.frexp(largest)[1] - self.bits if largest > 0 else self.first

    def bound(self, unit: int) -> float:
        """Partials of at least this size do not fit in the second integer; the step is refused."""
        return math.ldexp(1.0, unit + 2 * self.split - 24)

    def needs_second(self, unit: int, largest: float) -> bool:
        """Whether any partial went to the second integer."""
        return largest >= math.ldexp(1.0, unit + self.split)

    @staticmethod
    def remember(before: float, largest: float) -> float:
        """The largest partial that the next step assumes: this step's, or half of what this step assumed."""
        return max(largest, before / 2) if largest > 0 else before


PRODUCTS = Grid(bits=38, split=40, first=-40)
"""Matrices (a partial is a grain) and embeddings (a partial is a token): up to four million a global batch."""

TERMS = Grid(bits=32, split=34, first=-34)
"""Weights of norms: every token of every head is a partial, up to 268 million a global batch."""
