"""Which rows of an activation form one grain: the unit whose partial sum a weight gradient rounds to its grid.

A grain is a run of ``contract.grain`` positions of one sample, counted from position 0 of the sample: a function of the batch alone. A rank
may hold whole grains, or parts of them (slices of sequence parallelism, chunks of context parallelism, experts whose copies saw different
tokens). Parts are gathered, or sent to the grain's owner: each grain has one owner among the ranks that hold its rows.

Legend: ``R`` rows, ``G`` grains, ``E`` weights (experts).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tio_megatron import collectives
from tio_megatron.layers.sequences import Sequences

Group = ProcessGroup | None

_SAMPLE = 32
"""A label is ``sample << 32 | position``: sorting labels sorts rows by sample, then by position."""


@dataclass(frozen=True)
class Grains:
    """Rows cut in grains, for one weight or for several.

    ``starts`` [G + 1] int64: grain ``g`` is rows ``starts[g] .. starts[g + 1]`` of ``order``. ``of`` [E + 1] int64: weight ``e`` has the
    grains ``of[e] .. of[e + 1]``. ``order`` [R] int64: which row comes when; ``None`` for rows as they lie.
    """

    starts: Tensor
    of: Tensor
    order: Tensor | None = None

    @classmethod
    def whole(cls, offsets: Tensor) -> Grains:
        """All rows of each weight as one grain: ``offsets`` [E + 1] int64."""
        return cls(offsets, torch.arange(offsets.numel(), device=offsets.device))

    def shared(self, rank: int, ranks: int) -> Grains:
        """Those grains that are ``rank``'s when ``ranks`` ranks that hold the same rows share them out."""
        if ranks == 1:
            return self
        mine = torch.arange(self.starts.numel() - 1, device=self.starts.device) % ranks == rank
        counts = self.starts.diff()
        rows = torch.arange(int(self.starts[-1]), device=self.starts.device) if self.order is None else self.order
        order = rows[mine.repeat_interleave(counts, output_size=rows.numel())]
        before = torch.cat((mine.new_zeros(1, dtype=torch.int64), mine.cumsum(0)))
        return Grains(_offsets(counts[mine]), before[self.of], order)


def cut(labels: Tensor, grain: int, offsets: Tensor | None = None) -> Grains:
    """Sort rows by sample and position and cut them in grains.

    Args:
        labels: [R] int64.
        grain: positions of a grain.
        offsets: [E + 1] int64, rows of each weight (sorted by weight already); ``None`` for one weight.

    >>> g = cut(label(torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1])), 2)
    >>> g.order.tolist(), g.starts.tolist(), g.of.tolist()
    ([1, 3, 0, 2], [0, 2, 4], [0, 2])
    """
    rows = labels.numel()
    offsets = torch.tensor([0, rows], device=labels.device) if offsets is None else offsets
    weight = torch.arange(offsets.numel() - 1, device=offsets.device).repeat_interleave(offsets.diff(), output_size=rows)
    order = torch.argsort(labels, stable=True)
    if offsets.numel() > 2:
        order = order[torch.argsort(weight[order], stable=True)]
    key = grain_of(labels, grain)[order]
    if not rows:
        return Grains(torch.zeros(1, dtype=torch.int64, device=labels.device), torch.zeros_like(offsets))
    new = torch.ones(rows, dtype=torch.bool, device=labels.device)
    new[1:] = (key[1:] != key[:-1]) | (weight[1:] != weight[:-1])
    starts = torch.cat((new.nonzero().squeeze(1), torch.tensor([rows], device=labels.device)))
    of = torch.cat((new.new_zeros(1, dtype=torch.int64), new.cumsum(0)))[offsets]
    straight = bool((order[1:] > order[:-1]).all())
    return Grains(starts, of, None if straight else order)


def label(samples: Tensor, positions: Tensor) -> Tensor:
    """``sample << 32 | position``, [R] int64."""
    return (samples << _SAMPLE) | positions


def grain_of(labels: Tensor, grain: int) -> Tensor:
    """The same with the number of the grain in place of the position."""
    position = labels & ((1 << _SAMPLE) - 1)
    return labels - position + position // grain


def splits(parts: list[Tensor], grain: int) -> bool:
    """Whether any grain has rows in more than one of ``parts`` (labels)."""
    keys = torch.cat([grain_of(part, grain).unique() for part in parts])
    return bool(keys.unique().numel() < keys.numel())


@dataclass
class MicroBatch:
    """The rows of one micro-batch as this rank and its neighbours hold them. One object serves all layers; cuts are computed once.

    Args:
        sequences: samples and this rank's part of them.
        grain: positions of a grain.
        replica: this rank's place among the ranks that hold other samples (data parallelism); makes labels unique over the world.
        context: the context-parallel group.
        tensor: the tensor-parallel group, whose ranks hold slices of the rows under sequence parallelism.
        block: both: every rank that holds a part of these samples.
        experts_over: ranks over which one copy of the experts is cut (expert-parallel size times expert-tensor-parallel size).
        copies: the expert-data-parallel group, whose ranks hold the same part of each copy of the experts.
        padded: packed samples have padding inside.
    """

    sequences: Sequences
    grain: int
    replica: int = 0
    context: Group = None
    tensor: Group = None
    block: Group = None
    experts_over: int = 0
    copies: Group = None
    padded: bool = False
    _known: dict[tuple[object, ...], object] = field(default_factory=dict)

    def labels(self, length: int, batch: int, slices: int = 1, part: int = 0) -> Tensor:
        """Labels of this rank's rows: ``length`` positions (slices of sequence parallelism joined) of ``batch`` samples, of slice ``part``."""
        key = ("labels", length, batch)
        if key not in self._known:
            samples, positions = self.sequences.rows(length, batch)
            self._known[key] = label(samples + (self.replica << 16), positions)
        found = self._known[key]
        assert isinstance(found, Tensor)
        return found if slices == 1 else found.chunk(slices)[part]

    def samples(self, length: int, batch: int, slices: int = 1, part: int = 0) -> Tensor:
        """The sample of each of the same rows, counted from 0 in this micro-batch."""
        return (self.labels(length, batch, slices, part) >> _SAMPLE) - (self.replica << 16)

    def has_padding(self, length: int) -> bool:
        """Whether some of these rows are known to be padding. Rows of unpacked samples never say so."""
        return self.padded or self.sequences.has_tail(length)

    def product(self, length: int, batch: int) -> tuple[Grains, bool]:
        """Grains of whole rows (joined over ``tensor``), and whether context parallelism cuts them, so that operands must be gathered first."""
        key = ("product", length, batch)
        if key not in self._known:
            ranks = size(self.context)
            cut_up = ranks > 1 and splits([self._labels_of(rank, length, batch) for rank in range(ranks)], self.grain)
            mine = torch.cat([self._labels_of(r, length, batch) for r in range(ranks)]) if cut_up else self.labels(length, batch)
            grains = cut(mine, self.grain)
            self._known[key] = grains.shared(rank(self.context), ranks) if cut_up else grains, cut_up
        return self._known[key]  # type: ignore[return-value]

    def sliced(self, length: int, batch: int, slices: int) -> tuple[Grains, bool]:
        """The same for rows of which each rank of ``tensor`` holds one of ``slices`` slices; ``length`` is the joined length."""
        if slices == 1:
            return self.product(length, batch)
        key = ("sliced", length, batch)
        if key not in self._known:
            ranks = size(self.context)
            parts = [part for r in range(ranks) for part in self._labels_of(r, length, batch).chunk(slices)]
            cut_up = splits(parts, self.grain)
            if cut_up:
                grains = cut(torch.cat(parts), self.grain).shared(rank(self.context) * slices + rank(self.tensor), ranks * slices)
            else:
                grains = cut(parts[rank(self.context) * slices + rank(self.tensor)], self.grain)
            self._known[key] = grains, cut_up
        return self._known[key]  # type: ignore[return-value]

    def gather_product(self, x: Tensor) -> Tensor:
        """Rows of all ranks of ``context``, in rank order."""
        return collectives.all_gather(x.contiguous(), self.context)

    def gather_sliced(self, x: Tensor) -> Tensor:
        """Rows of all ranks of ``tensor``, then of ``context``, in rank order."""
        return self.gather_product(collectives.all_gather(x.contiguous(), self.tensor))

    def _labels_of(self, rank: int, length: int, batch: int) -> Tensor:
        """Labels of another rank of ``context``."""
        other = Sequences(self.sequences.starts, rank, size(self.context))
        samples, positions = other.rows(length, batch)
        return label(samples + (self.replica << 16), positions)

    @property
    def straddles(self) -> bool:
        """Whether the rows of any micro-batch of the world reach several copies of the experts; the answer is the same on all ranks.

        Blocks and copies are both runs of a pipeline stage's ranks, so every block lies inside one copy only where its size divides the copy's.
        """
        return self.experts_over % size(self.block) != 0

    def owners(self, length: int, batch: int, slices: int = 1, part: int = 0) -> Tensor:
        """The rank of ``copies`` that sums the grain of each of this rank's rows, [R] int64; arguments as :meth:`labels`.

        A grain that reaches a single copy stays there; the others take turns over the copies that they reach.
        """
        key = ("owners", length, batch, slices)
        if key not in self._known:
            parts = [chunk for r in range(size(self.context)) for chunk in self._labels_of(r, length, batch).chunk(slices)]
            first = self.replica * len(parts)
            copies = torch.cat([torch.full_like(chunk, (first + number) // self.experts_over) for number, chunk in enumerate(parts)])
            grains, of = grain_of(torch.cat(parts), self.grain).unique(return_inverse=True)
            lowest, highest = (copies.new_zeros(len(grains)).scatter_reduce(0, of, copies, how, include_self=False) for how in ("amin", "amax"))
            turns = lowest + torch.arange(len(grains)) % (highest - lowest + 1)
            self._known[key] = turns[of].split([len(chunk) for chunk in parts])
        found = self._known[key]
        assert isinstance(found, tuple)
        owners = found[rank(self.context) * slices + part]
        assert isinstance(owners, Tensor)
        return owners


def size(group: Group) -> int:
    """Ranks in ``group``; no group is one rank."""
    return 1 if group is None else group.size()


def rank(group: Group) -> int:
    """This rank's place in ``group``."""
    return 0 if group is None else group.rank()


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))
