"""Everything cut over the vocabulary: embedding, logits, log-probabilities; differentiable.

A rank holds the rows ``[first, first + VL)`` of the padded vocabulary. Rows from the true vocabulary on are padding, whatever a layout
pads to: their logits are never read, their gradient is zero, and they may hold NaN.

Legend: ``B`` batch, ``S`` sequence, ``T`` tokens, ``H`` hidden, ``V`` true vocabulary, ``VL`` rows of this rank, ``P`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tio_megatron import collectives
from tio_megatron.contract import Node, VocabOrder
from tio_megatron.contract.tree import ABSENT
from tio_megatron.kernels import embedding as embedding_kernel
from tio_megatron.kernels import linear as linear_kernel
from tio_megatron.kernels import logprob as kernel
from tio_megatron.kernels import math as kernel_math
from tio_megatron.layers import grads
from tio_megatron.layers.grains import Group, MicroBatch, rank, size
from tio_megatron.layers.linear import gathered, weight_grad

COLDEST = 1e-5
"""The lowest temperature: it keeps a model's logits within fp32, and below it vLLM samples greedily."""


@dataclass(frozen=True)
class VocabShard:
    """One rank's part of a vocabulary cut into equal shards of ``rows`` rows (padding included).

    Raises:
        ValueError: the shards do not hold the vocabulary, or a cut does not fall on the contract's blocks; says what would work.
    """

    order: VocabOrder
    rows: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.rows * self.ranks < self.order.vocab:
            raise ValueError(f"vocabulary: {self.ranks} shards of {self.rows} rows do not hold {self.order.vocab}")
        if self.ranks > 1 and self.rows < self.order.vocab and self.rows % self.order.block:
            works = -(-self.order.vocab // (self.order.block * self.ranks)) * self.order.block * self.ranks
            raise ValueError(
                f"vocabulary: {self.rows * self.ranks} rows cut into {self.ranks} shards of {self.rows}, which do not end on blocks of {self.order.block}; "
                f"pad the vocabulary to a multiple of {self.order.block * self.ranks} (such as {works})"
            )

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return self.rank * self.rows

    @property
    def true_rows(self) -> int:
        """Rows of this rank that are not padding; they come first."""
        return max(0, min(self.order.vocab - self.first, self.rows))

    @cached_property
    def spans(self) -> tuple[tuple[Node, ...], ...]:
        """Every rank's nodes of the tree over blocks."""
        return tuple(self.order.frontier(self.bound(r), self.bound(r + 1)) for r in range(self.ranks))

    def bound(self, shard: int) -> int:
        """The first row of ``shard`` in the order's own padding: shards of padding alone are empty ranges at its end."""
        row = shard * self.rows
        return self.order.padded if row >= self.order.vocab else row


def check_tokens(ids: torch.Tensor, vocab: int, what: str) -> None:
    """Refuse ids outside the true vocabulary.

    Raises:
        ValueError: names the first such id and its place.
    """
    wrong = (ids < 0) | (ids >= vocab)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"{what}: id {int(ids[tuple(place)])} at {place} is outside the vocabulary of {vocab}")


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, shard: VocabShard, *, group: Group = None, sequence_parallel: bool = False) -> torch.Tensor:
    """The rows of the embedding for ``ids``. Each row is moved from the one rank that owns it: nothing is summed, so -0 stays -0.

    Args:
        ids: ``[S, B]`` int64, the same on every rank.
        weight: ``[VL, H]``, this rank's rows.
        shard: which rows those are.
        group: the ranks that hold the other rows.
        sequence_parallel: return only this rank's slice of dimension 0.

    Returns:
        ``[S, B, H]``, or ``[S / P, B, H]``.

    Raises:
        ValueError: an id outside the vocabulary, a weight of other rows than the shard's, or a sequence that does not divide by the ranks.
    """
    if weight.dim() != 2 or not shard.true_rows <= weight.shape[0] <= shard.rows:  # rows of padding may be left out
        raise ValueError(f"embedding: the weight has shape {list(weight.shape)}; this rank's shard is [{shard.rows}, H]")
    check_tokens(ids, shard.order.vocab, "embedding")
    if sequence_parallel and ids.shape[0] % size(group):
        raise ValueError(f"embedding: {ids.shape[0]} positions do not divide by {size(group)} ranks of sequence parallelism; pad the sequence")
    return _Embedding.apply(ids, weight, shard, group, sequence_parallel and size(group) > 1)


def vocab_logits(
    x: torch.Tensor, weight: torch.Tensor, shard: VocabShard, *, group: Group = None, sequence_parallel: bool = False, batch: MicroBatch | None = None
) -> torch.Tensor:
    """fp32 logits of this rank's rows, not rounded.

    Args:
        x: ``[S, B, H]`` (this rank's slice of dimension 0 under sequence parallelism) bf16 or fp32.
        weight: ``[VL, H]``, same dtype; padding rows may hold NaN.
        shard: which rows those are.
        group: the ranks that hold the other rows.
        sequence_parallel: gather ``x`` first, scatter its gradient.
        batch: the grains of the weight's gradient; ``None`` sums all rows of this rank as one.

    Returns:
        ``[S, B, VL]`` fp32; columns of padding rows hold anything.
    """
    rows = _Logits.apply(x, weight, shard, group, sequence_parallel, batch)
    return rows.view(-1, *x.shape[1:-1], rows.shape[-1])


def at_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 ``logits`` divided by the temperature (rounded to fp32 once): one rounding, before the maximum is taken.

    Raises:
        ValueError: the temperature is not a positive finite number of fp32, or so small that the quotients may not be.
    """
    if not 0 < temperature <= torch.finfo(torch.float32).max:
        raise ValueError(f"temperature must be a positive finite number, got {temperature}")
    if temperature < COLDEST:
        raise ValueError(f"temperature {temperature} may take logits out of fp32; use {COLDEST} or more, or take the largest logit (greedy) instead")
    # A tensor, not a number: by a number some devices multiply with the reciprocal.
    return logits if temperature == 1 else logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)


def vocab_logprob(logits: torch.Tensor, target: torch.Tensor, shard: VocabShard, *, group: Group = None) -> torch.Tensor:
    """The log-probability of each target, with the exact maximum and the contract's sum over the true vocabulary.

    Args:
        logits: ``[..., VL]`` fp32, this rank's columns (divide by the temperature before).
        target: ``[...]`` int64, the same on every rank.
        shard: which columns those are.
        group: the ranks that hold the other columns.

    Returns:
        ``[...]`` fp32, the same on every rank.

    Raises:
        ValueError: a target outside the vocabulary, or of another shape than the logits' leading one.
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"log-probability: the target has shape {list(target.shape)} for logits {list(logits.shape)}; expected {list(logits.shape[:-1])}")
    check_tokens(target, shard.order.vocab, "log-probability")
    return _LogProb.apply(logits, target, shard, group)


def vocab_logprob_rows(logits: torch.Tensor, shard: VocabShard, *, group: Group = None) -> torch.Tensor:
    """All log-probabilities ``[..., V]`` fp32 from ``logits`` ``[..., VL]``, the same on every rank. Not differentiable."""
    flat = logits.detach().reshape(-1, logits.shape[-1])
    top, total, _ = _normaliser(flat, None, shard, group)
    rows = (flat - top[:, None]) - kernel_math.log(total)[:, None]
    if size(group) > 1:
        parts = collectives.all_gather(rows.contiguous(), group).view(size(group), *rows.shape)
        rows = parts.transpose(0, 1).flatten(1)
    return rows[:, : shard.order.vocab].reshape(*logits.shape[:-1], shard.order.vocab)


def _normaliser(flat: torch.Tensor, target: torch.Tensor | None, shard: VocabShard, group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, sum of exponentials and target logit of every token ``[T]``, each over all ranks."""
    top = kernel.vocab_max(flat, shard.true_rows)
    chosen = torch.zeros_like(top)
    if target is not None:
        local = target - shard.first
        mine = (local >= 0) & (local < shard.true_rows)
        chosen = torch.where(mine, flat.gather(1, local.clamp(0, shard.rows - 1)[:, None])[:, 0], chosen)
    if size(group) > 1:
        every = collectives.all_gather(torch.stack([top, chosen])[None], group)
        top = every[:, 0].amax(0)
        if target is not None:
            chosen = every[:, 1].gather(0, (target // shard.rows)[None])[0]
    mine_nodes = kernel.vocab_sumexp(flat, top, shard.order, shard.bound(shard.rank), shard.bound(shard.rank + 1))
    total = collectives.all_reduce_nodes(mine_nodes, shard.spans, shard.order.tree, group)
    return top, total, chosen


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, shard: VocabShard, group: Group, sliced: bool) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.shard, ctx.group, ctx.sliced = shard, group, sliced
        flat = ids.reshape(-1)
        if shard.ranks == 1:
            return embedding_kernel.embedding(flat, weight, 0).view(*ids.shape, -1)
        owner = flat // shard.rows
        mine = embedding_kernel.embedding(flat[owner == shard.rank], weight, shard.first)
        if sliced:
            slices = owner.view(shard.ranks, -1)
            sent = (slices == shard.rank).sum(1).tolist()
            owner = slices[rank(group)]
            received = torch.bincount(owner, minlength=shard.ranks).tolist()
            rows = collectives.all_to_all(mine, received, sent, group)
        else:
            rows = collectives.all_gather(mine, group, sizes=torch.bincount(owner, minlength=shard.ranks).tolist())
        # The rows came owner after owner, each in ascending token order: sorting the tokens by owner says where each belongs.
        out = torch.empty_like(rows)
        out[torch.argsort(owner, stable=True)] = rows
        return out.view(ids.shape[0] // (shard.ranks if sliced else 1), *ids.shape[1:], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        ids, weight = ctx.saved_tensors
        shard, flat = ctx.shard, ids.reshape(-1)
        owner = flat // shard.rows
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.sliced:
            slices = owner.view(shard.ranks, -1)
            own_slice = slices[rank(ctx.group)]
            received = (slices == shard.rank).sum(1).tolist()
            sent = torch.bincount(own_slice, minlength=shard.ranks).tolist()
            rows = collectives.all_to_all(rows[torch.argsort(own_slice, stable=True)], received, sent, ctx.group)
        elif shard.ranks > 1:
            rows = rows[owner == shard.rank]
        dw = grads.rows(weight, rows.contiguous(), flat[owner == shard.rank] - shard.first) if ctx.needs_input_grad[1] else None
        return None, dw, None, None, None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, shard: VocabShard, group: Group, sequence_parallel: bool, batch: MicroBatch | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shard, ctx.group, ctx.sequence_parallel, ctx.batch = shard, group, sequence_parallel, batch
        whole = gathered(x, group, sequence_parallel)
        ctx.shape = whole.shape[:-1]
        # A flat list of rows, no view of it: trainers divide logits by the temperature in place, which autograd refuses for a view made here.
        return linear_kernel.linear(whole.reshape(-1, whole.shape[-1]), weight, leaves=1, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.view(*ctx.shape, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _input_grad(dy, weight, ctx.shard, ctx.group, ctx.sequence_parallel, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = weight_grad(weight, dy, gathered(x, ctx.group, ctx.sequence_parallel), ctx.batch)
        return dx, dw, None, None, None, None


def _input_grad(dy: torch.Tensor, weight: torch.Tensor, shard: VocabShard, group: Group, sequence_parallel: bool, dtype: torch.dtype) -> torch.Tensor:
    """``dy @ weight`` over the vocabulary, whose leaves are the order's blocks. Padding rows of the weight are not read."""
    rows = dy.reshape(-1, dy.shape[-1])
    nodes = [_node_grad(rows, weight, shard, node) for node in shard.spans[shard.rank]]
    if shard.ranks == 1:
        return nodes[0].to(dtype).view(*dy.shape[:-1], -1)
    held = torch.stack(nodes) if nodes else rows.new_empty(0, len(rows), weight.shape[1], dtype=torch.float32)
    held = held.view(len(held), *dy.shape[:-1], weight.shape[1])
    if sequence_parallel:
        return collectives.reduce_scatter_nodes(held, shard.spans, shard.order.tree, group, out_dtype=dtype)
    return collectives.all_reduce_nodes(held, shard.spans, shard.order.tree, group, out_dtype=dtype)


def _node_grad(rows: torch.Tensor, weight: torch.Tensor, shard: VocabShard, node: Node) -> torch.Tensor:
    """The part of one node, fp32: one product where all its blocks are whole, else its halves'."""
    found, block = shard.order.rows_of(node), shard.order.block
    if found is not None:
        lo, hi = (end - shard.first for end in found)
        if lo == hi:
            return rows.new_full((len(rows), weight.shape[1]), ABSENT, dtype=torch.float32)
        if node.size == 1 or (hi - lo) % block == 0:
            return linear_kernel.matmul(rows[:, lo:hi], weight[lo:hi].t(), leaves=-(-(hi - lo) // block), out_dtype=torch.float32)
    half = node.size // 2
    left, right = Node(node.start, half), Node(node.start + half, half)
    total = _node_grad(rows, weight, shard, left)
    present = shard.order.rows_of(right)
    return total if present is not None and present[0] == present[1] else total.add_(_node_grad(rows, weight, shard, right))


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, shard: VocabShard, group: Group) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        top, total, chosen = _normaliser(flat, target.reshape(-1), shard, group)
        ctx.save_for_backward(logits, target, top, total)
        ctx.shard = shard
        return kernel.gather_logprob(chosen, top, total).view(target.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        logits, target, top, total = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        dlogits = kernel.logprob_backward(dy.reshape(-1), flat, top, total, target.reshape(-1) - ctx.shard.first, ctx.shard.true_rows)
        # A token nobody asks about sends +0, not 0 * NaN of logits that nobody read.
        return dlogits.masked_fill_(dy.reshape(-1, 1) == 0, 0.0).view(logits.shape), None, None, None
