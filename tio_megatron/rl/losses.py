"""The policy's loss per token: PPO's clipped surrogate, with two bounds (DAPO) and the dual clip. Elementwise; the sum is ``aggregate``'s."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tio_megatron.rl.sequences import one_shape


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

    Where a clip decided, or A is 0, the loss is finite and the gradient +0, also at a ratio that has overflowed to inf. Where no clip holds an
    infinite ratio (A < 0 without ``dual``, A > 0 with an infinite ``clip_high``) the loss is infinite.

    Args:
        ratio: fp32: :func:`~tio_megatron.rl.token_ratio`, or :func:`~tio_megatron.rl.sequence_ratio` for GSPO.
        advantages: fp32, one per token (:func:`~tio_megatron.rl.spread` makes them from one per sequence); constant for the gradient.
        clip: how far below 1 the ratio counts.
        clip_high: how far above; ``clip`` if none is given.
        dual: above 1; none switches the dual clip off.

    Raises:
        ValueError: bounds outside their range, or shapes that differ.
    """
    high = clip if clip_high is None else clip_high
    if not 0 <= clip <= 1 or not 0 <= high or (dual is not None and not dual > 1):
        raise ValueError(f"clipped_loss: needs clip in [0, 1], clip_high >= 0 and dual > 1; got clip {clip}, clip_high {high}, dual {dual}")
    one_shape("clipped_loss", ratio=ratio, advantages=advantages)
    advantages, value = advantages.detach(), ratio.detach()
    surrogate, bounded = value * advantages, value.clamp(1 - clip, 1 + high) * advantages
    surrogate = torch.where(value.isinf() & (advantages == 0), advantages, surrogate)
    clipped = bounded < surrogate
    objective = torch.where(clipped, bounded, surrogate)
    capped = torch.zeros_like(clipped)
    if dual is not None:
        floor = advantages * dual
        capped = (advantages < 0) & (objective < floor)
        objective = torch.where(capped, floor, objective)
    return PolicyLoss(_Loss.apply(ratio, objective, advantages.masked_fill(clipped | capped, 0.0)), clipped & ~capped, capped)


class _Loss(torch.autograd.Function):
    """``-objective``, whose derivative by the ratio is ``-slope``. What autograd would send through both branches of a clip is 0 * inf."""

    @staticmethod
    def forward(ctx: Any, ratio: Tensor, objective: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return -objective

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (-dy * slope).masked_fill((dy == 0) | (slope == 0), 0.0), None, None
