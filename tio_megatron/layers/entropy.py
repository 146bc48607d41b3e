"""Entropy of the next token from logits cut over the vocabulary; differentiable. Nothing is gathered: two numbers per token travel.

With ``d = x - max`` over the true vocabulary, ``S = sum(exp(d))`` and ``W = sum(exp(d) * d)``, both by the vocabulary's order::

    H = log(S) - W / S            dH / dx = p * (W / S - d),  p = exp(d) / S

Legend: ``T`` tokens, ``VL`` columns of this rank, ``P`` ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from tio_megatron import collectives
from tio_megatron.kernels import logprob as kernel
from tio_megatron.layers.grains import Group
from tio_megatron.layers.vocab import VocabShard


def vocab_entropy(logits: torch.Tensor, shard: VocabShard, *, group: Group = None) -> torch.Tensor:
    """The entropy, in nats, of the distribution that each token's logits give. A logit of -inf has probability 0 and adds nothing.

    Args:
        logits: ``[..., VL]`` fp32, this rank's columns (divide by the temperature before).
        shard: which columns those are.
        group: the ranks that hold the other columns.

    Returns:
        ``[...]`` fp32, the same on every rank.
    """
    return _Entropy.apply(logits, shard, group)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shard: VocabShard, group: Group) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        top = collectives.all_max(kernel.vocab_max(flat, shard.true_rows), group)
        held = (shard.order, shard.bound(shard.rank), shard.bound(shard.rank + 1))
        nodes = torch.stack([kernel.vocab_sumexp(flat, top, *held, weighted=w) for w in (False, True)], 1)
        total, weighted = collectives.all_reduce_nodes(nodes, shard.spans, shard.order.tree, group)
        ctx.save_for_backward(logits, top, total, weighted)
        ctx.columns = shard.true_rows
        return kernel.entropy(total, weighted).view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        logits, top, total, weighted = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        dlogits = kernel.entropy_backward(dy.reshape(-1), flat, top, total, weighted, ctx.columns)
        # As for the log-probability: a token nobody asks about sends +0.
        return dlogits.masked_fill_(dy.reshape(-1, 1) == 0, 0.0).view(logits.shape), None, None
