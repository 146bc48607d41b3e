"""CPU twins of the row operators of an NPU: each adds in the order that is published for the 910B, or says that none is.

``npu_rms_norm``: CANN's open sources (ops-nn, ``norm/rms_norm``) choose the kernel by the width of a row alone, square in fp32, fold the row in
halves down to 64 and add those as a tree; then ``round((x * r) * gamma)`` with one rounding. ``npu_grouped_matmul``: not published; one fp32 accumulator
over ascending terms is assumed. The permutations only move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.exact import sqrt
from tio_megatron.kernels.npu.twin_attention import tree


def fold(x: Tensor) -> Tensor:
    """Sum over the last axis: what is above the largest power of two is added to the front, then halves are added down to 64, then the tree."""
    width = x.shape[-1]
    body = 1 << (width.bit_length() - 1)
    if body != width:
        x = torch.cat([x[..., : width - body] + x[..., body:], x[..., width - body : body]], -1)
    while x.shape[-1] > 64:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return tree(x, x.shape[-1])


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x[..., H]``, ``gamma[H]`` to ``y[..., H]`` in the type of x and ``rstd[..., 1]`` fp32."""
    f = x.float()
    average = torch.tensor(1.0, dtype=torch.float32) / x.shape[-1]
    r = (1.0 / sqrt(fold(f * f) * average + torch.tensor(epsilon, dtype=torch.float32))).unsqueeze(-1)
    return ((f * r) * gamma.float()).to(x.dtype), r


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """``x[R, K] @ w[K, N]``: one fp32 accumulator over ascending K, one rounding to the type of x."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float32)
    xf, wf = x.float(), w.float()
    for i in range(x.shape[1]):
        total = total + xf[:, i, None] * wf[i]
    return total.to(x.dtype)


def grouped(x: Tensor, weight: Sequence[Tensor] | Tensor, ends: list[int]) -> Tensor:
    """Each expert's rows (cumulative ``ends``) times its ``weight[e]``, ``[K, N]``."""
    starts = [0, *ends[:-1]]
    return torch.cat([matmul(x[a:b], weight[e]) for e, (a, b) in enumerate(zip(starts, ends, strict=True))])


def permute(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, then by token; and, for each choice, the row it went to (int32)."""
    order = torch.argsort(indices.reshape(-1), stable=True)
    where = torch.empty_like(order)
    where[order] = torch.arange(order.numel())
    return tokens[order // indices.shape[1]], where.int()
