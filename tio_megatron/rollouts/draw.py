"""Draws that are the same on every machine: whole numbers only, and SHAKE-256 for chance.

A weight is a binary fraction, so all weights are whole multiples of one power of two. Their sums are exact, and a draw is a whole number below the
sum: no rounding, no library's random stream and no order of additions decides it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tio_megatron.rollouts.errors import StoreError


@dataclass(frozen=True)
class Drawn:
    """``places`` [n] int64, and ``probabilities`` [n] fp64: of each place in a single draw from all, rounded once. With ``N`` places, the
    importance weight of prioritised replay is ``(1 / (N p)) ** beta`` (Schaul et al. 2015, arXiv:1511.05952).
    """

    places: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


def draw(weights: npt.NDArray[np.float64] | Sequence[float], count: int, seed: int, *, replace: bool = True) -> Drawn:
    """Draw ``count`` places, each with a probability proportional to its weight.

    Args:
        weights: [N], finite, 0 or more; 0 is never drawn.
        count: how many, 1 or more.
        seed: a whole number; the same seed and weights give the same places, on every machine and version.
        replace: whether a place may be drawn again; without, the weights of those left decide the next draw.

    Raises:
        StoreError: no weight above 0, a weight that is none, or fewer places than ``count`` without replacement.

    >>> draw([1.0, 0.0, 3.0], 5, seed=7).places.tolist()
    [2, 2, 2, 2, 0]
    """
    held = np.asarray(weights, dtype=np.float64)
    if held.ndim != 1 or not np.isfinite(held).all() or (held < 0).any():
        raise StoreError("draw: weights must be finite numbers from 0 on, with one axis")
    if isinstance(seed, bool) or not isinstance(seed, int) or isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StoreError(f"draw: count must be a whole number from 1 on and seed a whole number, got {count!r} and {seed!r}")
    there = int(np.count_nonzero(held))
    if there == 0 or (not replace and there < count):
        raise StoreError(f"draw: {count} asked for{'' if replace else ' without replacement'}, {there} places have a weight above 0")
    whole = _whole(held)
    tree, total = _Tree(whole), sum(whole)
    chance = _Chance(seed)
    places, left = [], total
    for _ in range(count):
        place = tree.find(chance.below(left))
        places.append(place)
        if not replace:
            tree.add(place, -whole[place])
            left -= whole[place]
    return Drawn(np.array(places, dtype=np.int64), np.array([float(Fraction(whole[place], total)) for place in places]))


def _whole(weights: npt.NDArray[np.float64]) -> list[int]:
    """The weights as multiples of the finest power of two among them; exact."""
    pairs = [weight.as_integer_ratio() for weight in weights.tolist()]
    scale = math.lcm(*(below for _, below in pairs))
    return [above * (scale // below) for above, below in pairs]


class _Tree:
    """Sums of whole numbers by place, in a Fenwick tree (1994): change one and find the place of a sum in ``log N`` steps."""

    def __init__(self, values: Sequence[int]) -> None:
        self.sums = [0, *values]
        for i in range(1, len(self.sums)):
            above = i + (i & -i)
            if above < len(self.sums):
                self.sums[above] += self.sums[i]

    def add(self, place: int, value: int) -> None:
        i = place + 1
        while i < len(self.sums):
            self.sums[i] += value
            i += i & -i

    def find(self, below: int) -> int:
        """The first place at which the running sum exceeds ``below``."""
        at, step = 0, 1 << (len(self.sums).bit_length() - 1)
        while step:
            if at + step < len(self.sums) and self.sums[at + step] <= below:
                at += step
                below -= self.sums[at]
            step >>= 1
        return at


class _Chance:
    """Whole numbers below a bound, all alike: the ``i``-th comes from SHAKE-256 of the seed and ``i``; what lies outside is drawn again."""

    def __init__(self, seed: int) -> None:
        self.seed, self.calls = seed, 0

    def below(self, bound: int) -> int:
        bits = (bound - 1).bit_length()
        if bits == 0:
            return 0
        size = -(-bits // 8)
        while True:
            said = hashlib.shake_256(f"tio_megatron rollouts {self.seed} {self.calls}".encode()).digest(size)
            self.calls += 1
            found = int.from_bytes(said, "little") >> (8 * size - bits)
            if found < bound:
                return found
