"""Whitening: mean 0 and variance 1 over all tokens of the batch, whose moments are exact."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.rl.exact import Moments
from tio_megatron.rl.sequences import one_shape


def whiten(x: Tensor, sequence: Tensor, *, shift: bool = True, epsilon: float = 1e-8, moments: Moments | None = None) -> Tensor:
    """``(x - mean) / sqrt(var + epsilon)`` over the tokens, ``+ mean`` again without ``shift``. ``var`` has n - 1 degrees of freedom.

    Args:
        x: fp32, one number per token.
        sequence: int64 of the same shape; -1 is no token.
        shift: take the mean away.
        epsilon: added to the variance.
        moments: of the whole batch, where this rank has a part of it: ``token_moments(x, sequence).over(group)``, and ``+`` over micro-batches.

    Returns:
        fp32, 0 where there is no token. Not differentiable.

    Raises:
        ValueError: types or shapes that do not fit.
    """
    one_shape("whiten", x=x, sequence=sequence)
    moments = moments or token_moments(x, sequence)
    mean, deviation = moments.means(), moments.deviations(epsilon=epsilon)
    y = (x.detach() - mean) / deviation
    return torch.where(sequence >= 0, y if shift else y + mean, torch.zeros(()))


def token_moments(x: Tensor, sequence: Tensor) -> Moments:
    """Count, mean and variance of ``x`` over all tokens."""
    return Moments.of(x, sequence.clamp(max=0))
