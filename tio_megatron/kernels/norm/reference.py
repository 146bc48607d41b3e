"""RMSNorm, defined. ``H`` is the normalised axis; everything is fp32 between reading and the one rounding at the end.

mean = (sum of x * x) / H        sum: chains of 32 joined by the tree
y    = round((x * inv) * w)      inv = 1 / sqrt(mean + eps), each step correctly rounded
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.exact import row_dot, sqrt


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last axis, kept as an axis of 1."""
    f = x.float()
    mean = row_dot(f, f) / torch.tensor(float(x.shape[-1]), dtype=torch.float32)
    return (1.0 / sqrt(mean + torch.tensor(eps, dtype=torch.float32))).unsqueeze(-1)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """``x[..., H]``, ``w[H]`` -> ``[..., H]`` in the type of x."""
    return ((x.float() * inverse_rms(x, eps)) * w.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum is rounded to the activation type first; the variance is that of the rounded sum."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, w, eps), total


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``dx`` in the type of x, ``dw[H]`` fp32.

    With g = dy * w:  dx = round((g - x * k) * inv),  k = ((sum of g * x) / H * inv) * inv.  dw sums dy * (x * inv) over rows, in
    chains of 32 rows joined by the tree.
    """
    f, d = x.float(), dy.float()
    inv = inverse_rms(x, eps)
    g = d * w.float()
    k = ((row_dot(g, f).unsqueeze(-1) / torch.tensor(float(x.shape[-1]), dtype=torch.float32)) * inv) * inv
    dx = ((g - f * k) * inv).to(x.dtype)
    h = x.shape[-1]
    rows = (f * inv).reshape(-1, h)
    if rows.shape[0] == 0:
        return dx, torch.zeros(h, dtype=torch.float32)
    return dx, row_dot(d.reshape(-1, h).t(), rows.t())
