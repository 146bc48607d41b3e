"""A plan for pieces of given lengths: places become segments of three flat buffers, messages become runs. Computed once, then carried out.

Small sums are frequent (one a token in decode), so a call does nothing that could be done when its shape was first seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from tio_megatron.collectives import plan, wire
from tio_megatron.collectives.failure import Call

X, SLOTS, OUT = 0, 1, 2

Segment = tuple[int, int, int]
"""A buffer (the flat input, the scratch slots, the result), first element, one past the last."""


@dataclass(frozen=True)
class Bundle:
    """What one rank sends or receives in an all-to-all: ``counts`` elements by peer, lying in ``parts``, joined where one follows another."""

    parts: tuple[Segment, ...]
    counts: tuple[int, ...]
    wide: int
    """Elements together."""


@dataclass(frozen=True)
class Step:
    """One :class:`~tio_megatron.collectives.plan.Round` in segments."""

    how: str
    leaving: Bundle
    arriving: Bundle
    sends: tuple[tuple[int, Segment], ...]
    recvs: tuple[tuple[int, Segment], ...]
    adds: tuple[tuple[Segment, Segment, Segment], ...]
    copies: tuple[tuple[Segment, Segment], ...]


@dataclass(frozen=True)
class Program:
    """All steps of one rank, and the scratch elements they need. ``name`` says by which schedule."""

    name: str
    steps: tuple[Step, ...]
    scratch: int

    def where(self, number: int) -> tuple[str, tuple[int, ...]]:
        """In words where in it step ``number`` is, and the ranks of the group that this one exchanges with there."""
        step, before = self.steps[number], sum(bool(step.how) for step in self.steps[: number + 1])
        peers = sorted({peer for peer, segment in (*step.sends, *step.recvs) if segment[2] > segment[1]})
        return f" ({self.name}, exchange {before} of {sum(bool(step.how) for step in self.steps)})", tuple(peers)


@lru_cache(maxsize=1024)
def compiled(schedule: str, owned: plan.Owned, leaves: int, rank: int, direct: bool, elements: int, lengths: tuple[int, ...] | None) -> Program:
    """The program of ``rank`` for an input of F rows of ``elements``.

    Args:
        schedule: one of :data:`~tio_megatron.collectives.plan.SCHEDULES`.
        owned: nodes each rank starts with.
        leaves: leaves of the tree.
        rank: this rank.
        direct: the result is fp32.
        elements: in one row of the input.
        lengths: of each rank's piece, for a reduce-scatter; None for an all-reduce.
    """
    size = len(owned)
    steps = plan.make(schedule, owned, leaves, rank, lengths is None, direct)
    scattered = lengths is not None
    pieces = lengths if lengths is not None else cut(elements, size) if steps.cut else (elements,)
    # With scatter every slot is of this rank's own piece, and slots without gaps travel without packing.
    stride = pieces[rank] if schedule == "scatter" and size > 1 else max(pieces)
    return Program(schedule, _steps(steps.rounds, rank, size, pieces, elements, stride, scattered), steps.slots * stride)


@lru_cache(maxsize=1024)
def gathering(rank: int, lengths: tuple[int, ...]) -> Program:
    """The program of an all-gather of pieces of ``lengths``, where each rank's own is in the result already."""
    return Program("doubling", _steps(plan.gather_rounds(len(lengths), rank), rank, len(lengths), lengths, sum(lengths), 0, False), 0)


def cut(elements: int, size: int) -> tuple[int, ...]:
    """``size`` lengths that sum to ``elements`` and differ by at most one: the pieces of an all-reduce."""
    return tuple(elements // size + (i < elements % size) for i in range(size))


def carry_out(what: str, program: Program, x: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, group: wire.Group) -> None:
    """Run a program on its three flat buffers.

    Raises:
        CollectiveError: a rank is missing; names it, the collective ``what`` and its group.
    """
    buffers = (x, slots, out)

    def at(segment: Segment) -> torch.Tensor:
        return buffers[segment[0]][segment[1] : segment[2]]

    with Call(what, group, program.where) as call:
        for call.number, step in enumerate(program.steps):
            if step.how:
                assert group is not None, "one rank alone has nobody to exchange with"
                if step.how == "swap":
                    _swap(step, buffers, group, call.deadline)
                else:
                    wire.links([(peer, at(s)) for peer, s in step.sends], [(peer, at(s)) for peer, s in step.recvs], group, call.deadline)
            for left, right, target in step.adds:
                torch.add(at(left), at(right), out=at(target))
            for source, target in step.copies:
                at(target).copy_(at(source))


def _swap(step: Step, buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], group: wire.AnyGroup, deadline: float) -> None:
    """One all-to-all. Only what goes to several ranks, or lies apart, is packed."""
    leaving, arriving = [[buffers[b][lo:hi] for b, lo, hi in bundle.parts] for bundle in (step.leaving, step.arriving)]
    like = (leaving or arriving or buffers)[0]
    x = leaving[0] if len(leaving) == 1 else torch.cat(leaving) if leaving else like[:0]
    if len(arriving) == 1:
        wire.all_to_all(arriving[0], step.arriving.counts, x, step.leaving.counts, group, deadline)
        return
    packed = like.new_empty(step.arriving.wide)
    wire.all_to_all(packed, step.arriving.counts, x, step.leaving.counts, group, deadline)
    start = 0
    for part in arriving:
        part.copy_(packed[start : start + part.numel()])
        start += part.numel()


def _steps(rounds: Iterable[plan.Round], rank: int, size: int, pieces: Sequence[int], elements: int, stride: int, scattered: bool) -> tuple[Step, ...]:
    starts = list(accumulate(pieces, initial=0))
    base = starts[rank] if scattered and size > 1 else 0

    def at(piece: int, place: int) -> Segment:
        start, length = starts[piece], pieces[piece]
        if place >= 0:
            return SLOTS, place * stride, place * stride + length
        if place == plan.OUT:
            return OUT, start - base, start - base + length
        row = (-2 - place) * elements
        return X, row + start, row + start + length

    found = []
    for r in rounds:
        sends = tuple((peer, at(piece, place)) for peer, piece, place in r.sends)
        recvs = tuple((peer, at(piece, place)) for peer, piece, place in r.recvs)
        adds = tuple((at(piece, left), at(piece, right), at(piece, target)) for piece, left, right, target in r.adds)
        copies = tuple((at(piece, place), at(piece, plan.OUT)) for piece, place in r.copies)
        found.append(Step(r.how, _bundle(sends, size), _bundle(recvs, size), sends, recvs, adds, copies))
    return tuple(found)


def _bundle(messages: Sequence[tuple[int, Segment]], size: int) -> Bundle:
    counts = [0] * size
    parts: list[Segment] = []
    for peer, (buffer, lo, hi) in sorted(messages, key=lambda message: message[0]):
        counts[peer] += hi - lo
        if parts and parts[-1][0] == buffer and parts[-1][2] == lo:
            parts[-1] = buffer, parts[-1][1], hi
        elif hi > lo:
            parts.append((buffer, lo, hi))
    return Bundle(tuple(parts), tuple(counts), sum(counts))
