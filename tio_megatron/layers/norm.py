"""RMSNorm with its weight; differentiable. Legend: ``H`` the normalised axis."""

from __future__ import annotations

import math
from typing import Any

import torch

from tio_megatron.kernels import norm as kernel
from tio_megatron.layers import grads


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis in fp32, one rounding at the end.

    The weight's gradient is summed over the tokens and heads this rank has seen; each one's term is a grain of its own.

    Args:
        x: ``[..., H]`` bf16 or fp32.
        weight: ``[H]``, same dtype.
        eps: added to the mean of the squares.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: ``eps`` is negative or no finite number; from the kernel, for shapes or dtypes that do not fit.
    """
    if not 0 <= eps < math.inf:
        raise ValueError(f"rms_norm: eps is {eps}; expected a finite number of at least 0, such as 1e-6")
    return _Norm.apply(x, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernel.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx, total = kernel.rms_norm_backward(dy.contiguous(), x, weight, ctx.eps)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = grads.norm(weight, dy.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[0]), ctx.eps, total)
        return dx if ctx.needs_input_grad[0] else None, dw, None
