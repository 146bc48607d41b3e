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
        first_split: ``split`` until then: wider, so that the first step of an unscaled loss needs no second integer.
    """

    bits: int
    split: int
    first: int
    first_split: int

    @staticmethod
    def capacity(split: int) -> int:
        """Partials of one global batch that cannot overflow either integer."""
        return int(2 ** (62 - split))

    def split_of(self, largest: float) -> int:
        """``split`` when ``largest`` is the largest partial known (0: none yet). It decides which integer a partial goes to, never a byte."""
        return self.split if largest > 0 else self.first_split

    def unit(self, largest: float) -> int:
        """The exponent of a count when ``largest`` is the largest partial known (0: none yet).

        >>> PRODUCTS.unit(1.0), PRODUCTS.unit(0.99), PRODUCTS.unit(0.0)
        (-37, -38, -40)
        """
        return math.frexp(largest)[1] - self.bits if largest > 0 else self.first

    @staticmethod
    def bound(unit: int, split: int) -> float:
        """Partials of at least this size do not fit in the second integer; the step is refused."""
        return math.ldexp(1.0, unit + 2 * split - 24)

    @staticmethod
    def needs_second(unit: int, split: int, largest: float) -> bool:
        """Whether any partial went to the second integer."""
        return largest >= math.ldexp(1.0, unit + split)

    @staticmethod
    def remember(before: float, largest: float) -> float:
        """The largest partial that the next step assumes: this step's, or half of what this step assumed."""
        return max(largest, before / 2) if largest > 0 else before


PRODUCTS = Grid(bits=38, split=40, first=-40, first_split=48)
"""Matrices, where a partial is a grain: four million a global batch, 16384 in the first."""

ROWS = Grid(bits=38, split=40, first=-40, first_split=40)
"""Embeddings, where every token is a partial (and a grain, if tied to the head): four million a global batch."""

TERMS = Grid(bits=32, split=34, first=-34, first_split=34)
"""Weights of norms, where every token of every head is a partial: 268 million a global batch."""

MEANS = Grid(bits=38, split=48, first=-56, first_split=48)
"""Any parameter where the loss is a mean over a micro-batch and a partial is all of one: gradients are small, so the first step's counts are finer.
16384 micro-batches a global batch."""

MEANS_TERMS = Grid(bits=32, split=34, first=-40, first_split=34)
"""The same for weights of norms, where every row is a partial."""
