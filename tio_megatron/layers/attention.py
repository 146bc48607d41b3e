"""Causal attention of whole sequences, in a batch or packed; differentiable.

Legend: ``S`` tokens of a sequence, ``B`` batch, ``T`` packed tokens, ``Q`` query heads, ``G`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tio_megatron.kernels import attention as kernel


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Each token attends to itself and to the earlier tokens of its sequence.

    Args:
        q: ``[S, B, Q, D]``, or ``[T, Q, D]`` with ``cu_seqlens``; bf16 or fp32.
        k, v: the same with ``G`` heads.
        scale: multiplies every score.
        cu_seqlens: ``[sequences + 1]`` starts of packed sequences. Tokens behind the last one (padding) form a sequence of their own.

    Returns:
        The shape and dtype of ``q``.

    Raises:
        ValueError: shapes, dtypes or lengths do not fit.
    """
    axes = 4 if cu_seqlens is None else 3
    if q.dim() != axes or k.dim() != axes or k.shape != v.shape or q.shape[: axes - 2] != k.shape[: axes - 2] or q.shape[-1] != k.shape[-1]:
        wanted = "q [S, B, Q, D] and k, v [S, B, G, D]" if cu_seqlens is None else "q [T, Q, D] and k, v [T, G, D] with cu_seqlens"
        raise ValueError(f"attention: q has shape {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected {wanted}")
    if not math.isfinite(scale):
        raise ValueError(f"attention: scale is {scale}; expected a finite number, such as D ** -0.5")
    if cu_seqlens is not None:
        return _Attention.apply(q, k, v, _covering(cu_seqlens, q.shape[0]), scale)
    length, batch = q.shape[:2]
    rows = [t.transpose(0, 1).reshape(batch * length, *t.shape[2:]) for t in (q, k, v)]
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * length
    out = _Attention.apply(*rows, cu_seqlens, scale)
    return out.view(batch, length, *q.shape[2:]).transpose(0, 1)


def _covering(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """``cu_seqlens`` as int32 on the host, where some kernels read it, with the tokens behind the last sequence as one more."""
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise ValueError(f"attention: cu_seqlens has shape {list(cu_seqlens.shape)}; expected [sequences + 1], starting with 0")
    cu_seqlens = cu_seqlens.to("cpu", torch.int32)
    last = int(cu_seqlens[-1])
    if last > tokens:
        raise ValueError(f"attention: cu_seqlens ends at {last}, but there are {tokens} tokens")
    return cu_seqlens if last == tokens else torch.cat([cu_seqlens, cu_seqlens.new_tensor([tokens])])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
        out, lse = kernel.attention(q, k, v, cu_q=cu_seqlens, cu_k=cu_seqlens, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        dq, dk, dv = kernel.attention_backward(dout.contiguous(), q, k, v, out, lse, cu_q=cu_seqlens, cu_k=cu_seqlens, scale=ctx.scale)
        return dq, dk, dv, None, None
