"""What a training step reports about numbers per token: count, mean, smallest, largest, how many are not zero. Order-free, like all sums here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tio_megatron import collectives
from tio_megatron.layers.grains import Group
from tio_megatron.rl.exact import ExactSum


@dataclass(frozen=True)
class Summary:
    """Facts about some numbers; ``+`` joins parts of a batch, :meth:`over` joins ranks. The mean is rounded once, to fp32."""

    sums: ExactSum
    nonzero: int
    smallest: float
    largest: float

    @staticmethod
    def of(x: Tensor, sequence: Tensor | None = None) -> Summary:
        """Facts about the elements of ``x`` fp32, those where ``sequence`` is -1 left out."""
        kept = x.detach().reshape(-1) if sequence is None else x.detach()[sequence >= 0]
        empty = not kept.numel()
        smallest, largest = (math.inf, -math.inf) if empty else (float(kept.min()) + 0.0, float(kept.max()) + 0.0)
        return Summary(ExactSum.of(kept), int((kept != 0).sum()), smallest, largest)

    @property
    def count(self) -> int:
        """How many numbers."""
        return int(self.sums.counts()[0])

    @property
    def mean(self) -> float:
        """Their mean; NaN for none."""
        return float(self.sums.means()[0])

    def __add__(self, other: Summary) -> Summary:
        low, high = (torch.tensor([a, b]) for a, b in ((self.smallest, other.smallest), (self.largest, other.largest)))
        return Summary(self.sums + other.sums, self.nonzero + other.nonzero, float(low.min()), float(high.max()))

    def over(self, group: Group) -> Summary:
        """Facts about the numbers of all ranks of ``group``."""
        ends = collectives.all_max(torch.tensor([-self.smallest, self.largest]), group)
        nonzero = collectives.all_gather(torch.tensor([self.nonzero]), group).sum()
        return Summary(self.sums.over(group), int(nonzero), 0.0 - float(ends[0]), float(ends[1]))
