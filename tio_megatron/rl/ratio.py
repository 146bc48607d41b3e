"""Probability ratios between the policy that learns and the one that acted: per token (PPO), per sequence (GSPO)."""

from __future__ import annotations

from torch import Tensor

from tio_megatron.layers.grains import Group
from tio_megatron.rl.exponential import exp
from tio_megatron.rl.sequences import sequence_means, spread


def token_ratio(logprob: Tensor, old: Tensor) -> Tensor:
    """``exp(logprob - old)``, fp32: exactly 1 where the two are equal. Differentiable by ``logprob``; ``old`` counts as constant."""
    return exp(logprob - old.detach())


def sequence_ratio(logprob: Tensor, old: Tensor, sequence: Tensor, sequences: int, *, group: Group = None) -> Tensor:
    """GSPO's ratio of whole sequences, length-normalised, one per token::

        s = exp( mean over the sequence's tokens of (logprob - old) )
        s_t = s as a number;  d s_t / d logprob_t = s

    That is GSPO-token (equation 14 of the paper): with one advantage per sequence, and weights that average over a sequence's tokens, its
    gradient is GSPO's, and no gradient crosses from token to token, so nothing is summed in the backward.

    Args:
        logprob, old: fp32, one number per token.
        sequence: int64 of the same shape; -1 is no token, and its ratio is 1.
        sequences: ``N``.
        group: ranks that hold other tokens of the same sequences.
    """
    means = sequence_means(logprob.detach() - old.detach(), sequence, sequences, group=group)
    return exp(spread(means, sequence) + (logprob - logprob.detach()).where(sequence >= 0, 0.0))
