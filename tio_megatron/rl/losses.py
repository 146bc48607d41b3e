"""The policy's loss per token: PPO's clipped surrogate, with two bounds (DAPO) and the dual clip. Elementwise; the sum is ``aggregate``'s."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """``loss`` fp32 per token; ``clipped`` and ``capped`` bool: where the clip, and the dual clip, decided (no gradient there)."""

    loss: Tensor
    clipped: Tensor
    capped: Tensor


def clipped_loss(ratio: Tensor, advantages: Tensor, *, clip: float = 0.2, clip_high: float | None = None, dual: float | None = None) -> PolicyLoss:
    """The pessimistic of two surrogates, negated::

        L = -min( ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A )
        A < 0, dual clip:   L = -max( the same minimum, dual * A )

    At ratio 1 that is exactly ``-A``. Of two equal surrogates the unclipped one is taken, with its gradient. NaN in the ratio stays NaN.

    Args:
        ratio: fp32: :func:`~tio_megatron.rl.token_ratio`, or :func:`~tio_megatron.rl.sequence_ratio` for GSPO.
        advantages: fp32, one per token (:func:`~tio_megatron.rl.spread` makes them from one per sequence); constant for the gradient.
        clip: how far below 1 the ratio counts.
        clip_high: how far above; ``clip`` if none is given.
        dual: above 1; none switches the dual clip off.

    Raises:
        ValueError: bounds outside their range.
    """
    high = clip if clip_high is None else clip_high
    if not 0 <= clip <= 1 or not 0 <= high or (dual is not None and not dual > 1):
        raise ValueError(f"clipped_loss: needs clip in [0, 1], clip_high >= 0 and dual > 1; got clip {clip}, clip_high {high}, dual {dual}")
    advantages = advantages.detach()
    surrogate, bounded = ratio * advantages, ratio.clamp(1 - clip, 1 + high) * advantages
    clipped = bounded < surrogate
    objective = torch.where(clipped, bounded, surrogate)
    capped = torch.zeros_like(clipped)
    if dual is not None:
        floor = advantages * dual
        capped = (advantages < 0) & (objective < floor)
        objective = torch.where(capped, floor, objective)
    return PolicyLoss(-objective, clipped & ~capped, capped)
