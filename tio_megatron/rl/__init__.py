"""The arithmetic of reinforcement learning, once: from logits to a loss, for any engine. Names no engine, owns no weight, runs no loop.

fp32, elementwise, or sums that are *exact*: the true sum of all terms, rounded once (:mod:`tio_megatron.rl.exact`). So no result depends on
data parallelism, micro-batches, packing or the order of samples. Formulas and their sources: ``docs/rl.md``.

Legend: ``N`` sequences of the global batch, ``G`` groups (samples of one prompt). A tensor of tokens has any shape; ``sequence`` is int64 of that
shape and says which sequence a token belongs to, -1 for what is no response token (prompt, padding). Such a place decides no number of another,
and what it gets from the backward is +0, whatever it holds: NaN stays there.
"""

from tio_megatron.rl.advantages import group_advantages
from tio_megatron.rl.aggregate import token_weights, weighted_sum
from tio_megatron.rl.exact import ExactSum, Moments
from tio_megatron.rl.gae import gae
from tio_megatron.rl.importance import importance_weights, masked, truncated
from tio_megatron.rl.kl import kl
from tio_megatron.rl.losses import PolicyLoss, clipped_loss
from tio_megatron.rl.ratio import sequence_ratio, token_ratio
from tio_megatron.rl.report import Summary
from tio_megatron.rl.scores import token_entropy, token_logprob
from tio_megatron.rl.sequences import sequence_means, sequence_sums, spread
from tio_megatron.rl.whiten import token_moments, whiten

__all__ = [
    "ExactSum",
    "Moments",
    "PolicyLoss",
    "Summary",
    "clipped_loss",
    "gae",
    "group_advantages",
    "importance_weights",
    "kl",
    "masked",
    "sequence_means",
    "sequence_ratio",
    "sequence_sums",
    "spread",
    "token_entropy",
    "token_logprob",
    "token_moments",
    "token_ratio",
    "token_weights",
    "truncated",
    "weighted_sum",
    "whiten",
]
