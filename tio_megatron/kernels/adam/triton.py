"""Adam in Triton: elementwise, the bytes of ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 1024


@triton.jit
def _adam(
    weight,
    grad,
    exp_avg,
    exp_avg_sq,
    out,
    n,
    beta1,
    new1,
    beta2,
    new2,
    eps,
    decay,
    rate,
    correction,
    DECOUPLED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    w = tl.load(weight + at, mask=here, other=0.0)
    g = tl.load(grad + at, mask=here, other=0.0)
    if not DECOUPLED:
        g = tl.fma(w, decay, g)
    first = tl.fma(tl.load(exp_avg + at, mask=here, other=0.0), beta1, g * new1)
    second = tl.fma(tl.load(exp_avg_sq + at, mask=here, other=0.0), beta2, (g * new2) * g)
    direction = tl.div_rn(first, tl.fma(tl.sqrt_rn(second), correction, eps))
    if DECOUPLED:
        w = tl.fma(w, -decay, w)
    w = tl.fma(direction, -rate, w)
    tl.store(weight + at, w, mask=here)
    tl.store(exp_avg + at, first, mask=here)
    tl.store(exp_avg_sq + at, second, mask=here)
    if ROUNDED:
        tl.store(out + at, w.to(tl.bfloat16), mask=here)


def adam_(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, numbers: list[float], decoupled: bool) -> None:
    """``tio::adam_``: the scalars become fp32 with one rounding as they are passed."""
    if weight.numel():
        given = (weight, grad, exp_avg, exp_avg_sq, weight if out is None else out, weight.numel(), *map(float, numbers))
        _adam[(triton.cdiv(weight.numel(), BLOCK),)](*given, DECOUPLED=decoupled, ROUNDED=out is not None, BLOCK=BLOCK, **TWO_ROUNDINGS)
    increment_version([written for written in (weight, exp_avg, exp_avg_sq, out) if written is not None])


KERNELS = {"adam_": adam_}
