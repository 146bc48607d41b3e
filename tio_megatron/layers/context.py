"""Attention of sequences that are cut over ranks (context parallelism), with the bytes of one rank; differentiable.

Each rank holds some tokens of every sequence. Tokens move until a rank holds whole sequences, :func:`tio_megatron.layers.attention.attention`
runs as on one rank, and its result moves back. Nothing is added on the way, and partial softmaxes are never merged. Two ways:

* heads (where query and key/value heads both divide by the ranks): all-to-all, each rank attends with its part of the heads. Per rank
  ``(2 * Q + 2 * G) * D * T * (C - 1) / C**2`` elements forward and as many backward; the arithmetic is shared out evenly.
* tokens (otherwise): all-gather, every rank attends with all heads and keeps its own rows; backward gathers the output's gradient and
  keeps its own rows again. Forward ``(Q + 2 * G) * D * T * (C - 1) / C`` elements, backward ``Q * D * T * (C - 1) / C``. Every rank does the
  arithmetic, and holds the memory, of the whole attention: exact, but no faster than one rank.

Legend: ``C`` ranks, ``n`` this rank's rows of the sequence axis and ``T = C * n`` all of them, ``B`` batch, ``Q`` query heads, ``G`` key/value
heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tio_megatron.collectives import all_gather, all_to_all
from tio_megatron.layers.attention import attention
from tio_megatron.layers.sequences import Sequences

Group = ProcessGroup | None


def context_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, sequences: Sequences, group: Group) -> Tensor:
    """Causal attention of this rank's tokens to all earlier tokens of their sequences, wherever these are.

    Args:
        q: ``[n, B, Q, D]``, or ``[n, Q, D]`` where ``sequences`` are packed; bf16 or fp32.
        k, v: the same with ``G`` heads.
        scale: multiplies every score.
        sequences: where this rank's rows belong; the starts are those of the whole pack.
        group: the ranks that hold the other tokens, with the rank and size of ``sequences``.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        ValueError: sequences that do not divide into the chunks of context parallelism, or another group.
    """
    if sequences.ranks == 1:
        return attention(q, k, v, scale=scale, cu_seqlens=sequences.starts)
    order = global_rows(sequences, q.shape[0]).to(q.device)
    _check(sequences, group)
    by_heads = not (q.shape[-2] % sequences.ranks or k.shape[-2] % sequences.ranks)
    way: _Heads | _Tokens = _Heads(order, group, sequences.ranks) if by_heads else _Tokens(order, group, sequences)
    whole = _Move.apply(way.spread, way.collect, q, k, v)
    (out,) = _Move.apply(way.collect, way.spread, attention(*whole, scale=scale, cu_seqlens=sequences.starts))
    return out


def global_rows(sequences: Sequences, length: int) -> Tensor:
    """``[C * length]`` int64: the rows of all ranks one after another, each as its place on the sequence axis of the whole micro-batch.

    Args:
        sequences: any rank's.
        length: rows of the sequence axis that each rank holds.

    Raises:
        ValueError: sequences that do not divide into the chunks of context parallelism.

    >>> global_rows(Sequences(torch.tensor([0, 4, 12]), ranks=2), 6).tolist()
    [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]
    """
    rows = []
    for rank in range(sequences.ranks):
        sample, position = replace(sequences, rank=rank).rows(length, 1)
        rows.append(position if sequences.starts is None else position + sequences.starts.to(torch.int64)[sample])
    return torch.cat(rows)


def own_tokens(x: Tensor, sequences: Sequences) -> Tensor:
    """This rank's part of what belongs to the tokens of a whole micro-batch: ``[b, T, ...]`` to ``[b, n, ...]``.

    Raises:
        ValueError: sequences that do not divide into the chunks of context parallelism.
    """
    if sequences.ranks == 1:
        return x
    if x.shape[1] % (2 * sequences.ranks):
        raise ValueError(f"context parallelism: {x.shape[1]} tokens do not divide into {2 * sequences.ranks} chunks; pad them")
    length = x.shape[1] // sequences.ranks
    return x.index_select(1, global_rows(sequences, length)[sequences.rank * length :][:length].to(x.device))


def all_tokens(x: Tensor, sequences: Sequences, group: Group) -> Tensor:
    """The inverse of :func:`own_tokens`, from all ranks: ``[b, n, ...]`` to ``[b, T, ...]``, the same on every rank. Not differentiable."""
    if sequences.ranks == 1:
        return x
    _check(sequences, group)
    order = global_rows(sequences, x.shape[1])
    return all_gather(x.detach().transpose(0, 1).contiguous(), group).index_select(0, order.argsort().to(x.device)).transpose(0, 1)


def _check(sequences: Sequences, group: Group) -> None:
    place = (0, 1) if group is None else (group.rank(), group.size())
    if place != (sequences.rank, sequences.ranks):
        raise ValueError(
            f"context parallelism: the tokens are cut for rank {sequences.rank} of {sequences.ranks}, but this is rank {place[0]} of a group of {place[1]}"
        )


@dataclass(frozen=True)
class _Heads:
    """Own tokens of all heads to all tokens of own heads, and back. Tensors travel together, joined along their heads."""

    order: Tensor
    group: Group
    ranks: int

    def spread(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each ``[n, ..., h, D]`` to ``[T, ..., h / C, D]``."""
        parts = torch.cat([torch.stack(t.chunk(self.ranks, -2)) for t in tensors], -2)
        rows = all_to_all(parts.flatten(0, 1), None, None, self.group)
        return rows.index_select(0, self.order.argsort()).split([t.shape[-2] // self.ranks for t in tensors], -2)

    def collect(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each ``[T, ..., h / C, D]`` to ``[n, ..., h, D]``."""
        joined = torch.cat(tensors, -2).index_select(0, self.order)
        parts = all_to_all(joined, None, None, self.group).unflatten(0, (self.ranks, -1))
        return tuple(torch.cat(t.unbind(0), -2) for t in parts.split([t.shape[-2] for t in tensors], -2))


@dataclass(frozen=True)
class _Tokens:
    """Own tokens to all tokens, and own rows of them. Each is the other's gradient: every rank computes the whole, and each row counts once."""

    order: Tensor
    group: Group
    sequences: Sequences

    def spread(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each ``[n, ..., h, D]`` to ``[T, ..., h, D]``."""
        rows = all_gather(torch.cat(tensors, -2), self.group)
        return rows.index_select(0, self.order.argsort()).split([t.shape[-2] for t in tensors], -2)

    def collect(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each ``[T, ..., h, D]`` to ``[n, ..., h, D]``."""
        own = self.order.chunk(self.sequences.ranks)[self.sequences.rank]
        return tuple(t.index_select(0, own) for t in tensors)


Moved = Callable[..., tuple[Tensor, ...]]


class _Move(torch.autograd.Function):
    """A move of bytes; gradients move the other way. Nothing is added, so no zero changes its sign."""

    @staticmethod
    def forward(ctx: Any, there: Moved, back: Moved, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return there(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back(*gradients)
