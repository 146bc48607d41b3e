"""Estimators of a KL divergence from the tokens that were drawn, one number per token."""

from __future__ import annotations

from torch import Tensor

from tio_megatron.rl.exponential import excess

ESTIMATORS = ("k1", "k2", "k3")


def kl(logprob: Tensor, other: Tensor, estimator: str = "k3", *, bound: float | None = None, log_bound: float | None = None) -> Tensor:
    """Estimates KL(p || q) from tokens drawn from p, with ``r = log q - log p``::

        k1 = -r                    unbiased; may be negative
        k2 = r^2 / 2               biased, low variance; its gradient is that of the true divergence
        k3 = e^r - 1 - r           unbiased, never negative; its gradient is not that of the divergence

    All are exactly 0 where the two agree. k3 is computed without cancellation (:mod:`tio_megatron.rl.exponential`).

    Args:
        logprob: fp32, ``log p`` of the drawn tokens.
        other: fp32 of the same shape, ``log q``.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        bound: the result is clamped to plus and minus this (no gradient beyond). The customary low-variance KL is k3 with 10 and 20.
        log_bound: ``r`` is clamped to plus and minus this, first.

    Returns:
        fp32, differentiable by both.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl: estimator {estimator!r} is unknown; use one of {ESTIMATORS}")
    r = other - logprob
    if log_bound is not None:
        r = r.clamp(-log_bound, log_bound)
    value = 0.0 - r if estimator == "k1" else r * r * 0.5 if estimator == "k2" else excess(r)
    return value if bound is None else value.clamp(-bound, bound)
