"""Log-probability and entropy of tokens from logits that may be cut over the vocabulary. The vocabulary is never gathered.

Both are :mod:`tio_megatron.layers`' own functions, with the temperature in front and the shard worked out from the group.
"""

from __future__ import annotations

from torch import Tensor

from tio_megatron.contract import Contract
from tio_megatron.layers.entropy import vocab_entropy
from tio_megatron.layers.grains import Group, rank, size
from tio_megatron.layers.vocab import VocabShard, at_temperature, vocab_logprob


def token_logprob(logits: Tensor, target: Tensor, vocab: int, *, temperature: float = 1.0, group: Group = None, contract: Contract | None = None) -> Tensor:
    """``log p(target)`` of ``softmax(logits / temperature)``; differentiable.

    Args:
        logits: ``[..., VL]`` fp32: all columns, or this rank's equal part of them; columns from ``vocab`` on are padding and never read.
        target: ``[...]`` int64.
        vocab: the true vocabulary.
        temperature: divides the logits, one rounding.
        group: the ranks that hold the other columns.
        contract: whose order of the vocabulary; the default contract's if none is given.

    Returns:
        ``[...]`` fp32, the same bytes on every rank, for every number of ranks and every padding. A token whose gradient comes back as 0 (one
        without weight) sends +0 to its logits, whatever they hold.

    Raises:
        ValueError: a target outside the vocabulary, a temperature below 1e-5 or not finite, shards that do not end on blocks.
    """
    return vocab_logprob(at_temperature(logits, temperature), target, _shard(logits, vocab, group, contract), group=group)


def token_entropy(logits: Tensor, vocab: int, *, temperature: float = 1.0, group: Group = None, contract: Contract | None = None) -> Tensor:
    """The entropy ``-sum(p * log(p))`` in nats of the same distribution, by the formula in :mod:`tio_megatron.layers.entropy`; differentiable.

    Arguments, result and errors as in :func:`token_logprob`.
    """
    return vocab_entropy(at_temperature(logits, temperature), _shard(logits, vocab, group, contract), group=group)


def _shard(logits: Tensor, vocab: int, group: Group, contract: Contract | None) -> VocabShard:
    return VocabShard((contract or Contract()).vocab_order(vocab), logits.shape[-1], rank(group), size(group))
