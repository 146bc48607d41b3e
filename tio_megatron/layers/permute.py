"""Which row of an expert batch belongs to which token: the bookkeeping of routing, moved bytes only.

Shapes: ``T`` tokens, ``k`` choices of a token, ``R`` rows (one for each choice whose expert is here), ``n`` local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_ROUTED = -1
"""The expert id of a padding token's choices: such a token has no row anywhere."""


@dataclass(frozen=True)
class RowPlan:
    """The rows of the experts ``[lo, hi)``, sorted by expert and, inside one expert, by token.

    ``token`` [R] int64: the token of each row. ``index`` [T, k] int64: the row of each choice, -1 where its expert is not in
    ``[lo, hi)``. ``offsets`` [n + 1] int64: expert ``lo + i`` has the rows ``offsets[i] .. offsets[i + 1]``.
    """

    token: Tensor
    index: Tensor
    offsets: Tensor

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return self.token.numel()

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, [n] int64."""
        return self.offsets.diff()


@dataclass(frozen=True)
class SortedChoices:
    """The choices of all tokens, sorted by expert and then by token, before anybody has asked the device how many belong to a run of experts.

    ``shape`` is that of the ids, ``choice`` [T * k] int64 the place of each in them, ``edges`` [n + 1] int64 where the experts ``lo .. hi`` begin.
    """

    shape: torch.Size
    choice: Tensor
    edges: Tensor

    @classmethod
    def of(cls, ids: Tensor, lo: int, hi: int) -> SortedChoices:
        """Of the experts ``[lo, hi)``; arguments and errors as :func:`plan_rows`. Waits for nothing."""
        if ids.dim() != 2 or ids.dtype != torch.int64:
            raise ValueError(f"plan_rows: ids must be [T, k] int64, got {list(ids.shape)} {ids.dtype}")
        if not 0 <= lo < hi:
            raise ValueError(f"plan_rows: experts [{lo}, {hi}) are no run")
        experts, choice = ids.reshape(-1).sort(stable=True)
        return cls(ids.shape, choice, torch.searchsorted(experts, torch.arange(lo, hi + 1, device=ids.device)))

    @property
    def run(self) -> Tensor:
        """[2] int64, where the run of these experts begins and ends."""
        return self.edges[:: self.edges.numel() - 1]

    def plan(self, first: int, last: int) -> RowPlan:
        """The plan, once :attr:`run` is known."""
        choice = self.choice[first:last]
        index = torch.full_like(self.choice, -1)
        index[choice] = torch.arange(choice.numel(), device=choice.device)
        return RowPlan(choice // self.shape[1], index.view(self.shape), self.edges - self.edges[0])

    def whole(self) -> RowPlan:
        """A plan with a row for every choice, for which nothing need be known.

        Rows that belong to other experts are given to the first expert here, or the last, and no choice names them, so nothing reads what they become.
        """
        row = torch.arange(self.choice.numel(), device=self.choice.device)
        index = torch.empty_like(self.choice)
        index[self.choice] = torch.where((row >= self.edges[0]) & (row < self.edges[-1]), row, -1)
        ends = self.edges.new_zeros(1), self.edges.new_full((1,), self.choice.numel())
        return RowPlan(self.choice // self.shape[1], index.view(self.shape), torch.cat((ends[0], self.edges[1:-1], ends[1])))


def plan_rows(ids: Tensor, lo: int, hi: int, *, every: bool = False, padded: bool = False) -> RowPlan:
    """The plan of the rows that tokens with expert choices ``ids`` send to the experts ``[lo, hi)``.

    One stable sort by expert; the experts ``[lo, hi)`` are a run of it. How long the run is only the device knows, so asking for it waits once;
    with ``every`` all sizes are known beforehand, with ``padded`` there is a row for every choice, and nothing waits.

    Args:
        ids: [T, k] int64, the chosen experts of each token; :data:`NOT_ROUTED` for a padding token.
        lo: first expert.
        hi: one past the last expert.
        every: the caller knows that each choice is in ``[lo, hi)``: all experts, no padding. It is not looked at.
        padded: rows of other experts too, which cost time and memory and are never read (:meth:`SortedChoices.whole`).

    Raises:
        ValueError: ``ids`` is not a two-dimensional int64 tensor, or the run of experts is empty or negative.

    >>> plan = plan_rows(torch.tensor([[0, 3], [2, 3], [-1, -1]]), 2, 4)
    >>> plan.token.tolist(), plan.index.tolist(), plan.offsets.tolist()
    ([1, 0, 1], [[-1, 1], [0, 2], [-1, -1]], [0, 1, 3])
    """
    choices = SortedChoices.of(ids, lo, hi)
    if padded and not every:
        return choices.whole()
    first, last = (0, ids.numel()) if every else choices.run.tolist()
    return choices.plan(first, last)


def chunk_order(counts: Tensor, rows: int | None = None) -> Tensor:
    """Where the rows of received chunks go so that rows are sorted by expert.

    Rows arrive as chunks, one for each (source, expert), sources outermost. The result ``order`` [R] int64 sorts them by
    expert, sources inside: ``rows[order]``.

    Args:
        counts: [sources, n] int64, rows of each chunk.
        rows: their sum, where it is known: else the device is asked.

    >>> chunk_order(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.argsort(experts.repeat_interleave(counts.reshape(-1), output_size=rows), stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes ``rows[order]``.

    >>> inverse_order(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
