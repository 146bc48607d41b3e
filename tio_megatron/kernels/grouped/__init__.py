"""The product over ragged experts in the contract's order. Routing and the sum over experts live in their own operators.

Shapes: ``E`` local experts, ``R`` rows sorted by expert, ``N`` outputs, ``K`` terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.kernels.grouped.cpu import PackedExperts, grouped_packed

__all__ = ["PackedExperts", "grouped_linear"]


def grouped_linear(
    x: torch.Tensor,
    w: PackedExperts | Sequence[torch.Tensor] | torch.Tensor,
    offsets: torch.Tensor,
    *,
    leaves: int,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows ``offsets[e]`` to ``offsets[e + 1]`` of ``x`` times ``w[e].T``. No autograd.

    Args:
        x: ``[R, K]``, fp32 or bf16, rows sorted by expert.
        w: packed experts, ``[E, N, K]``, or one ``[N, K]`` per expert.
        offsets: ``[E + 1]`` int64, ascending, from 0 to ``R``; experts may be empty.
        leaves: equal leaves of the ``K`` axis (of this shard).
        out_dtype: fp32 or bf16; default that of ``x``. One rounding.

    Returns:
        ``[R, N]``.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit, or ``leaves`` does not divide ``K``.
    """
    if not isinstance(w, PackedExperts):
        w = PackedExperts.from_weights(w)
    experts, n, k = w.shape
    out_dtype = out_dtype or x.dtype
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"grouped linear: rows {tuple(x.shape)} do not fit experts of {tuple(w.shape)}; they must be [R, {k}]")
    if leaves < 1 or k % leaves:
        works = [count for count in (1, 2, 4, 8, 16, 32, 64) if k % count == 0]
        raise ValueError(f"grouped linear: {k} terms do not divide into {leaves} equal leaves; {works} would work")
    if offsets.dtype != torch.int64 or offsets.shape != (experts + 1,):
        raise ValueError(f"grouped linear: offsets must be int64 of shape [{experts + 1}], got {offsets.dtype} {tuple(offsets.shape)}")
    if x.device.type == "cpu" and (int(offsets[0]) or int(offsets[-1]) != x.shape[0] or bool((offsets.diff() < 0).any())):
        raise ValueError(f"grouped linear: offsets must ascend from 0 to {x.shape[0]}, got {offsets.tolist()}")
    for dtype in (x.dtype, out_dtype):
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"grouped linear: dtype {dtype} is not supported; use torch.float32 or torch.bfloat16")
    if x.device.type not in ("cpu", "meta"):
        raise ValueError(f"grouped linear: no kernel for device {x.device}; supported is cpu")
    return grouped_packed(x, w.packed, n, offsets.contiguous(), leaves, out_dtype)
