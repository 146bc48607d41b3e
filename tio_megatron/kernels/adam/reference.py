"""Adam, defined: every rounding of one step."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.adam import Scalars
from tio_megatron.kernels.exact import fma, sqrt


def adam(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, s: Scalars) -> tuple[Tensor, Tensor, Tensor]:
    """The new ``weight``, ``exp_avg`` and ``exp_avg_sq``, all fp32."""
    beta1, new1, beta2, new2, eps, decay, rate, correction = (
        torch.tensor(number, dtype=torch.float32) for number in (s.beta1, s.new1, s.beta2, s.new2, s.eps, s.decay, s.rate, s.correction)
    )
    if not s.decoupled:
        grad = fma(decay, weight, grad)
    first = fma(beta1, exp_avg, new1 * grad)
    second = fma(beta2, exp_avg_sq, (new2 * grad) * grad)
    direction = first / fma(sqrt(second), correction, eps)
    kept = fma(-decay, weight, weight) if s.decoupled else weight
    return fma(-rate, direction, kept), first, second
