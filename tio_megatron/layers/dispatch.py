"""Tokens to the ranks of their experts and back, in the two ways Megatron knows. Both give the same bytes.

* :class:`AllToAll`: each rank sends the rows of its tokens to the experts' ranks and gets the expert outputs back; it holds all rows of its
  own tokens and sums them itself.
* :class:`AllGather`: every rank sees all tokens, sums the rows of its own experts to nodes of the expert tree, and the nodes meet at the
  token's owner.

Groups: ``ep`` over which experts are cut in contiguous runs, ``etp`` over which each expert is cut, ``all`` of both (etp fastest). The
ranks of ``all`` own different tokens. Any rank may own none, any expert may get none.

Shapes: ``t`` own tokens, ``T`` tokens of all ranks, ``k`` choices, ``R`` rows of the local experts, ``E`` experts, ``H`` hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tio_megatron.collectives import all_gather, all_to_all, reduce_scatter_nodes
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.kernels.combine import combine_backward
from tio_megatron.layers.experts import CombineRows, SpreadRows, expert_nodes, finish_sum
from tio_megatron.layers.permute import SortedChoices, chunk_order, inverse_order, plan_rows

Group = ProcessGroup | None


def _size(group: Group) -> int:
    return 1 if group is None else group.size()


def _rank(group: Group) -> int:
    return 0 if group is None else group.rank()


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of one expert layer and the number of experts in the whole model layer.

    Raises:
        ValueError: the experts do not divide by the size of ``ep``, or ``all`` is not ``ep`` times ``etp``.
    """

    experts: int
    ep: Group = None
    etp: Group = None
    all: Group = None

    def __post_init__(self) -> None:
        if self.experts % _size(self.ep):
            raise ValueError(f"experts: {self.experts} do not divide by an expert-parallel size of {_size(self.ep)}")
        ep, etp = _size(self.ep), _size(self.etp)
        if _size(self.all) != ep * etp:
            raise ValueError(f"experts: a group of {_size(self.all)} ranks is not expert-parallel {ep} times expert-tensor-parallel {etp}")

    @property
    def run(self) -> int:
        """Experts of one rank."""
        return self.experts // _size(self.ep)

    @property
    def lo(self) -> int:
        """First expert of this rank."""
        return _rank(self.ep) * self.run

    @property
    def hi(self) -> int:
        """One past the last expert of this rank."""
        return self.lo + self.run

    @property
    def tree(self) -> ReductionTree:
        """The order of the sum over experts."""
        return ReductionTree(self.experts)

    @property
    def spans(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes of each rank of ``ep``."""
        return tuple(self.tree.frontier(r * self.run, (r + 1) * self.run) for r in range(_size(self.ep)))


class AllToAll:
    """One layer call of the all-to-all way. Making it exchanges the row counts; the three methods are the three differentiable steps.

    ``to_experts`` and ``to_owner`` also move anything else that belongs to a row (they are plain moves of bytes).
    """

    def __init__(self, ids: Tensor, groups: ExpertGroups) -> None:
        """``ids`` [t, k] int64, ascending in each token, -1 for padding."""
        self.ids, self.groups = ids, groups
        choices = SortedChoices.of(ids, 0, groups.experts)
        own = choices.edges.diff()
        ep, etp = _size(groups.ep), _size(groups.etp)
        counts = all_gather(own.unsqueeze(0), groups.all).view(ep, etp, groups.experts)
        here = counts[:, :, groups.lo : groups.hi].transpose(0, 1)
        self.counts = here.sum(dim=(0, 1))
        sizes = torch.stack([own.view(ep, groups.run).sum(1), here[_rank(groups.etp)].sum(1)])
        # One question to the device: how many choices are routed, and all sizes of the moves.
        first, last, *known = torch.cat([choices.run, sizes.flatten(), here.sum(dim=(1, 2))]).tolist()
        self.plan = choices.plan(first, last)
        self._sent, self._received, self._gathered = known[:ep], known[ep : 2 * ep], known[2 * ep :]
        self._order = chunk_order(here.reshape(-1, groups.run), sum(self._gathered)) if ep * etp > 1 else None

    @property
    def offsets(self) -> Tensor:
        """[n + 1] int64, the rows of each local expert."""
        return torch.cat((self.counts.new_zeros(1), self.counts.cumsum(0)))

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows of own tokens, sorted by expert, [t * k, ...] -> rows of the local experts, sorted by expert, [R, ...]."""
        rows = all_to_all(rows, self._received, self._sent, self.groups.ep)
        rows = all_gather(rows, self.groups.etp, sizes=self._gathered)
        return rows if self._order is None else rows.index_select(0, self._order)

    def to_owner(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`to_experts`. The rows must be the same on all ranks of ``etp``."""
        if self._order is not None:
            rows = rows.index_select(0, inverse_order(self._order)).split(self._gathered)[_rank(self.groups.etp)]
        return all_to_all(rows.contiguous(), self._sent, self._received, self.groups.ep)

    def spread(self, x: Tensor) -> Tensor:
        """Own tokens [t, H] -> one row for each choice, sorted by expert."""
        rows: Tensor = SpreadRows.apply(x, self.plan, self.ids, self.groups.experts)
        return rows

    def label(self, labels: Tensor) -> Tensor:
        """What belongs to own tokens [t] -> the same of the rows of the local experts [R]."""
        return self.to_experts(labels.index_select(0, self.plan.token))

    def dispatch(self, rows: Tensor) -> Tensor:
        """Differentiable :meth:`to_experts`; the gradient must be complete on every rank of ``etp``."""
        moved: Tensor = _Move.apply(rows, self.to_experts, self.to_owner)
        return moved

    def collect(self, rows: Tensor) -> Tensor:
        """Differentiable :meth:`to_owner`."""
        moved: Tensor = _Move.apply(rows, self.to_owner, self.to_experts)
        return moved

    def combine(self, rows: Tensor, probs: Tensor) -> Tensor:
        """Rows of own tokens and [t, k] fp32 probabilities -> [t, H], each token's rows weighted and summed by the expert tree."""
        out: Tensor = CombineRows.apply(rows, probs, self.plan.index, self.ids, self.groups.experts)
        return out


class AllGather:
    """One layer call of the all-gather way. Making it gathers the choices of all tokens."""

    def __init__(self, ids: Tensor, groups: ExpertGroups) -> None:
        """``ids`` [t, k] int64, ascending in each token, -1 for padding."""
        self.ids, self.groups = ids, groups
        own = torch.tensor([ids.shape[0]], device=ids.device)
        self._sizes: list[int] = all_gather(own, groups.all).tolist()
        self._all_ids = self.gather(ids)
        self.plan = plan_rows(self._all_ids, groups.lo, groups.hi)
        # Ranks that differ in etp alone hold the same expert outputs; each sums only the tokens of its own column of ep.
        column = list(range(_rank(groups.etp), len(self._sizes), _size(groups.etp)))
        blocks = torch.arange(sum(self._sizes), device=ids.device).split(self._sizes)
        self._column = torch.cat([blocks[r] for r in column])
        self._column_sizes = [self._sizes[r] for r in column]

    @property
    def offsets(self) -> Tensor:
        """[n + 1] int64, the rows of each local expert."""
        return self.plan.offsets

    @property
    def counts(self) -> Tensor:
        """[n] int64, rows of each local expert."""
        return self.plan.counts

    def gather(self, x: Tensor) -> Tensor:
        """What belongs to own tokens, [t, ...] -> the same of all tokens, [T, ...]."""
        return all_gather(x.contiguous(), self.groups.all, sizes=self._sizes)

    def sum_at_owner(self, rows: Tensor, probs: Tensor | None) -> Tensor:
        """Rows of the local experts [R, H] and all tokens' probabilities [T, k] -> own tokens' sums by the expert tree, [t, H], rounded once."""
        index, ids = self.plan.index[self._column], self._all_ids[self._column]
        probs = None if probs is None else probs[self._column]
        g = self.groups
        nodes = expert_nodes(rows, index, ids, probs, experts=g.experts, lo=g.lo, hi=g.hi)
        root = reduce_scatter_nodes(nodes, g.spans, g.tree, g.ep, splits=self._column_sizes)
        return finish_sum(root, self.ids, rows.dtype)

    def probs_to_owner(self, dprobs: Tensor) -> Tensor:
        """Each choice's value from the rank of its expert, [T, k] -> [t, k]. A move: nothing is added."""
        ep, k = _size(self.groups.ep), dprobs.shape[1]
        mine = self.ids.shape[0]
        got = all_to_all(dprobs[self._column].contiguous(), [mine] * ep, self._column_sizes, self.groups.ep).view(ep, mine, k)
        source = (self.ids.clamp(min=0) // self.groups.run).unsqueeze(0)
        return got.gather(0, source).squeeze(0)

    def label(self, labels: Tensor) -> Tensor:
        """What belongs to own tokens [t] -> the same of the rows of the local experts [R]."""
        return self.gather(labels).index_select(0, self.plan.token)

    def dispatch(self, x: Tensor) -> Tensor:
        """Own tokens [t, H] -> rows of the local experts, sorted by expert, [R, H]; the gradient must be complete on every rank of ``etp``."""
        rows: Tensor = _GatherRows.apply(x, self)
        return rows

    def combine(self, rows: Tensor, probs: Tensor) -> Tensor:
        """Rows of the local experts and own tokens' probabilities [t, k] fp32 -> [t, H]."""
        out: Tensor = _CombineNodes.apply(rows, probs, self)
        return out


Move = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    """A move of bytes; the gradient moves the other way. Nothing is added, so no zero changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(d.contiguous()), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: AllGather) -> Tensor:
        ctx.way = way
        return way.gather(x).index_select(0, way.plan.token)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.sum_at_owner(drows.contiguous(), None), None


class _CombineNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor, way: AllGather) -> Tensor:
        every = way.gather(probs)
        ctx.save_for_backward(rows, every)
        ctx.way = way
        return way.sum_at_owner(rows, every)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, every = ctx.saved_tensors
        way = ctx.way
        drows, dprobs = combine_backward(way.gather(dout), rows, way.plan.index, every)
        return drows, way.probs_to_owner(dprobs), None
