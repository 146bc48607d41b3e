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


def plan_rows(ids: Tensor, lo: int, hi: int, *, every: bool = False) -> RowPlan:
    """The plan of the rows that tokens with expert choices ``ids`` send to the experts ``[lo, hi)``.

    One stable sort by expert; the experts ``[lo, hi)`` are a run of it. How long the run is only the device knows, so asking for it waits once;
    with ``every`` all sizes are known beforehand and nothing waits.

    Args:
        ids: [T, k] int64, the chosen experts of each token; :data:`NOT_ROUTED` for a padding token.
        lo: first expert.
        hi: one past the last expert.
        every: the caller knows that each choice is in ``[lo, hi)``: all experts, no padding. It is not looked at.

    Raises:
        ValueError: ``ids`` is not a two-dimensional int64 tensor, or the run of experts is empty or negative.

    >>> plan = plan_rows(torch.tensor([[0, 3], [2, 3], [-1, -1]]), 2, 4)
    >>> plan.token.tolist(), plan.index.tolist(), plan.offsets.tolist()
    ([1, 0, 1], [[-1, 1], [0, 2], [-1, -1]], [0, 1, 3])
    """
    if ids.dim() != 2 or ids.dtype != torch.int64:
        raise ValueError(f"plan_rows: ids must be [T, k] int64, got {list(ids.shape)} {ids.dtype}")
    if not 0 <= lo < hi:
        raise ValueError(f"plan_rows: experts [{lo}, {hi}) are no run")
    flat = ids.reshape(-1)
    experts, choice = flat.sort(stable=True)
    edges = torch.searchsorted(experts, torch.arange(lo, hi + 1, device=ids.device))
    if not every:
        first, last = edges[:: hi - lo].tolist()
        choice = choice[first:last]
    index = torch.full_like(flat, -1)
    index[choice] = torch.arange(choice.numel(), device=ids.device)
    return RowPlan(choice // ids.shape[1], index.view(ids.shape), edges - edges[0])


def chunk_order(counts: Tensor) -> Tensor:
    """Where the rows of received chunks go so that rows are sorted by expert.

    Rows arrive as chunks, one for each (source, expert), sources outermost. The result ``order`` [R] int64 sorts them by
    expert, sources inside: ``rows[order]``.

    Args:
        counts: [sources, n] int64, rows of each chunk.

    >>> chunk_order(torch.tensor([[1, 2], [2, 0]])).tolist()
    [0, 3, 4, 1, 2]
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.argsort(experts.repeat_interleave(counts.reshape(-1)), stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes ``rows[order]``.

    >>> inverse_order(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
