"""Statistics of a stream in bounded memory: quantiles by fixed bins, and means along an axis whose end is not known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BINS = 1 << 15


class Quantiles:
    """Quantiles of numbers >= 0, each at most 0.8% too small: bins are the upper 16 bits of fp32 (8 of exponent, 7 of mantissa)."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, dtype=np.int64)

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Count ``values``, finite and >= 0."""
        self.counts += np.bincount(values.astype(np.float32).view(np.uint32) >> 16, minlength=_BINS)[:_BINS]

    def __getitem__(self, q: float) -> float:
        total = int(self.counts.sum())
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self.counts), max(1, int(np.ceil(q * total)))))
        return float(np.array([index << 16], dtype=np.uint32).view(np.float32)[0])


class Trend:
    """Mean and largest value along an axis, in at most ``bins`` equal bins that widen (two become one) whenever the axis turns out longer."""

    def __init__(self, bins: int = 128) -> None:
        self.width, self.bins = 1, bins
        self.count = np.zeros(bins, dtype=np.int64)
        self.total = np.zeros(bins)
        self.largest = np.zeros(bins)

    def add(self, places: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """``values`` at the integer ``places`` of the axis."""
        if not len(places):
            return
        while int(places.max()) >= self.width * self.bins:
            self._widen()
        at = places // self.width
        self.count += np.bincount(at, minlength=self.bins)
        self.total += np.bincount(at, weights=values, minlength=self.bins)
        np.maximum.at(self.largest, at, values)

    def _widen(self) -> None:
        half = self.bins // 2
        for name, join in (("count", np.add), ("total", np.add), ("largest", np.maximum)):
            held = getattr(self, name)
            joined = join(held[0::2], held[1::2])
            held[:half], held[half:] = joined, 0
        self.width *= 2

    def rows(self) -> list[tuple[int, int, int, float, float]]:
        """(first place, place behind the last, values, mean, largest) of every bin that has some."""
        return [
            (i * self.width, (i + 1) * self.width, int(n), float(self.total[i] / n), float(self.largest[i])) for i, n in enumerate(self.count.tolist()) if n
        ]

    def growth(self) -> float:
        """Mean of the last third of the axis divided by that of the first third; 1.0 where that says nothing."""
        used = np.flatnonzero(self.count)
        if len(used) < 6:
            return 1.0
        third = len(used) // 3
        means = [self.total[part].sum() / self.count[part].sum() for part in (used[:third], used[-third:])]
        return float(means[1] / means[0]) if means[0] > 0 else 1.0
