"""Estimators of a KL divergence from the tokens that were drawn, one number per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tio_megatron.rl.exponential import excess, expm1
from tio_megatron.rl.ratio import log_ratio
from tio_megatron.rl.sequences import one_shape

ESTIMATORS = ("k1", "k2", "k3")


def kl(logprob: Tensor, other: Tensor, estimator: str = "k3", *, bound: float | None = None, log_bound: float | None = None) -> Tensor:
    """Estimates KL(p || q) from tokens drawn from p, with ``r = log q - log p``::

        k1 = -r                    unbiased; may be negative
        k2 = r^2 / 2               biased, low variance; its gradient is that of the true divergence
        k3 = e^r - 1 - r           unbiased, never negative; its gradient is not that of the divergence

    All are exactly 0 where the two agree, in -inf too. k3 is computed without cancellation (:mod:`tio_megatron.rl.exponential`).

    Args:
        logprob: fp32, ``log p`` of the drawn tokens.
        other: fp32 of the same shape, ``log q``.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        bound: the result is clamped to plus and minus this (no gradient beyond). The customary low-variance KL is k3 with 10 and 20.
        log_bound: ``r`` is clamped to plus and minus this, first.

    Returns:
        fp32, differentiable by both; infinite where one log-probability is -inf and no bound holds it. Where the gradient that comes back is 0 (a
        token without weight), and beyond a bound, the gradient is +0.

    Raises:
        ValueError: an unknown estimator, shapes that differ, or a bound that is not positive.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl: estimator {estimator!r} is unknown; use one of {ESTIMATORS}")
    one_shape("kl", logprob=logprob, other=other)
    if not (bound is None or bound > 0) or not (log_bound is None or log_bound > 0):
        raise ValueError(f"kl: bounds must be positive (customary: bound 10, log_bound 20), got bound {bound} and log_bound {log_bound}")
    return _Estimate.apply(logprob, other, estimator, bound, log_bound)


class _Estimate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprob: Tensor, other: Tensor, estimator: str, bound: float | None, log_bound: float | None) -> Tensor:
        free = log_ratio(other, logprob)
        r = free if log_bound is None else free.clamp(-log_bound, log_bound)
        value = 0.0 - r if estimator == "k1" else r * r * 0.5 if estimator == "k2" else excess(r)
        found = value if bound is None else value.clamp(-bound, bound)
        held = ((r != free) & ~free.isnan()) | ((found != value) & ~value.isnan())
        ctx.save_for_backward(r, held)
        ctx.estimator = estimator
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        r, held = ctx.saved_tensors
        # By r: -1, r, e^r - 1. 0 times what is infinite or missing would be NaN.
        if ctx.estimator == "k1":
            dr = -dy
        elif ctx.estimator == "k2":
            half = dy * 0.5 * r
            dr = half + half
        else:
            dr = dy * expm1(r)
        dead = (dy == 0) | held
        return (-dr).masked_fill(dead, 0.0), dr.masked_fill(dead, 0.0), None, None, None
