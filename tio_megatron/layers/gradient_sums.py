"""Gradients as exact integer sums: what a parameter's sum remembers, how ranks join it, and which of its partials cannot be summed.

A gradient's partials (one for each grain) are rounded to a grid and added as 64-bit integers, so their order is free (``docs/contract.md``,
"Sums over tokens"). An engine gives each parameter that it trains a :class:`ParameterSum` as ``parameter.tio_sum`` and sets :class:`ToSums`;
where the integers lie, and when they become fp32, is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.contract.grid import Grid
from tio_megatron.kernels.integer_sum import IntegerSum, add_norm_terms, add_products, add_rows
from tio_megatron.layers import grads
from tio_megatron.layers.grains import Grains, Group, size

MESSAGE = 1 << 23
"""Integers in one message (64 MiB), unless one tensor alone has more."""


class BadGradient(ArithmeticError):
    """A gradient that cannot be summed; raised on all ranks. Weights, optimizer and what the sums remember are as before the step."""


class ParameterSum:
    """The sum of one parameter (on this rank: of its shard) and what its logical tensor has to remember between steps.

    ``largest`` is the largest partial assumed for the next step (``R`` of the contract); part of a checkpoint. ``partials`` counts those that
    this rank added.
    """

    def __init__(self, name: str, parameter: Tensor, sums: IntegerSum, grid: Grid) -> None:
        self.name, self.parameter, self.sums, self.grid = name, parameter, sums, grid
        self.largest = 0.0
        self.partials = 0

    @property
    def uses_second(self) -> bool:
        """Whether any partial (of any rank, once the peaks are agreed on) went to the second integer."""
        return self.grid.needs_second(self.sums.unit, self.sums.split, float(self.sums.peak))

    def open(self) -> IntegerSum:
        """The sum, to be added to; an engine may refuse here."""
        return self.sums

    def add_rows(self, dy: Tensor, ids: Tensor) -> None:
        """Add ``dy`` ``[R, H]`` at rows ``ids`` ``[R]`` of a table, each row as one partial."""
        add_rows(self.open(), dy, ids)
        self.partials += len(ids)

    def returned(self) -> Tensor | None:
        """What ``backward`` returns for the parameter, now that its gradient is in the sum."""
        return None

    def problem(self, ranks: int) -> str | None:
        """Why the partials cannot be summed over ``ranks`` ranks that add to this sum, once the peaks are agreed on; ``None`` if they can."""
        s, peak = self.sums, float(self.sums.peak)
        if not peak < float("inf"):
            return f"{self.name}: NaN or infinite"
        if peak >= (bound := self.grid.bound(s.unit, s.split)):
            return f"{self.name}: {peak:.3g}, at least {bound:.3g}"
        if self.partials * ranks > (capacity := self.grid.capacity(s.split)):
            return f"{self.name}: {self.partials} partial sums on each of {ranks} ranks, more than {capacity} in all"
        return None


def sum_of(parameter: Tensor) -> ParameterSum | None:
    """The sum of a parameter that an engine trains under a contract."""
    return getattr(parameter, "tio_sum", None)


class ToSums:
    """The sink of :mod:`.grads` that adds to the sums of the parameters; parameters without a sum follow the plain rule."""

    def __init__(self) -> None:
        self._plain = grads.ToAutograd()

    def products(self, weights: Sequence[Tensor], dy: Tensor, x: Tensor, grains: Grains) -> list[Tensor | None]:
        """Adds the grains to the sums of the weights."""
        found = [p for weight in weights if (p := sum_of(weight)) is not None]
        if len(found) < len(weights):
            return self._plain.products(weights, dy, x, grains)
        add_products([p.open() for p in found], dy, x, starts=grains.starts, of=grains.of, order=grains.order)
        for p, count in zip(found, grains.of.diff().tolist(), strict=True):
            p.partials += count
        return [p.returned() for p in found]

    def rows(self, weight: Tensor, dy: Tensor, ids: Tensor) -> Tensor | None:
        """Adds the rows to the sum of the table."""
        found = sum_of(weight)
        if found is None:
            return self._plain.rows(weight, dy, ids)
        found.add_rows(dy, ids)
        return found.returned()

    def norm(self, weight: Tensor, dy: Tensor, x: Tensor, eps: float, total: Tensor) -> Tensor | None:
        """Adds each row's term."""
        found = sum_of(weight)
        if found is None:
            return self._plain.norm(weight, dy, x, eps, total)
        s = found.open()
        add_norm_terms(IntegerSum(s.low.view(-1), s.high.view(-1), s.peak, s.unit, s.split), dy, x, eps)
        found.partials += len(dy)
        return found.returned()


def add_over(parts: Sequence[Tensor], group: Group) -> None:
    """Add int64 tensors of any shape, each in its place, over ``group``; nothing to do for one rank.

    Integers have no order, so any collective of anybody will do; messages are cut to a bounded size.

    Args:
        parts: the same shapes on every rank.
        group: ``None`` is one rank.
    """
    if size(group) == 1:
        return
    waiting: list[Tensor] = []
    for part in parts:
        if waiting and sum(one.numel() for one in waiting) + part.numel() > MESSAGE:
            _add(waiting, group)
            waiting = []
        waiting.append(part)
    if waiting:
        _add(waiting, group)


def _add(parts: Sequence[Tensor], group: Group) -> None:
    joined = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(joined, group=group)
    for part, found in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.copy_(found.view(part.shape))
