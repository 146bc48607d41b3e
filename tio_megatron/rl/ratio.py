"""Probability ratios between the policy that learns and the one that acted: per token (PPO), per sequence (GSPO)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels import math as kernel
from tio_megatron.layers.grains import Group
from tio_megatron.rl.sequences import one_shape, sequence_means, spread


def token_ratio(logprob: Tensor, old: Tensor) -> Tensor:
    """``exp(logprob - old)``, fp32: exactly 1 where the two are equal, -inf included. Differentiable by ``logprob``; ``old`` counts as constant.

    Where the gradient that comes back is 0 (a token without weight, a clipped one), the gradient is +0, whatever the two hold there.

    Raises:
        ValueError: shapes that differ.
    """
    one_shape("token_ratio", logprob=logprob, old=old)
    return _Ratio.apply(logprob, log_ratio(logprob.detach(), old.detach()), None)


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

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    one_shape("sequence_ratio", logprob=logprob, old=old, sequence=sequence)
    means = sequence_means(log_ratio(logprob.detach(), old.detach()), sequence, sequences, group=group)
    return _Ratio.apply(logprob, spread(means, sequence), sequence < 0)


def log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """``a - b``, and 0 where they are equal: two log-probabilities of -inf agree like any others. Not differentiable."""
    return (a - b).masked_fill(a == b, 0.0)


class _Ratio(torch.autograd.Function):
    """``exp(logs)``, whose derivative by ``logprob`` is itself, but 0 at places that are ``absent``."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, logs: Tensor, absent: Tensor | None) -> Tensor:
        y = kernel.exp(logs)
        ctx.save_for_backward(y, *(() if absent is None else (absent,)))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        y, *absent = ctx.saved_tensors
        # 0 times an infinite or missing ratio would be NaN.
        dead = dy == 0 if not absent else (dy == 0) | absent[0]
        return (dy * y).masked_fill(dead, 0.0), None, None
