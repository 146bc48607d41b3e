"""The matrix product in the contract's order. What cuts it over ranks lives in ``layers``; ragged experts in ``kernels.grouped``.

Each output element is its own sum: rows, columns, tiles, threads and instruction sets never change a byte, only ``K`` and ``leaves``
do. Shapes: ``M`` rows, ``N`` outputs, ``K`` terms.
"""

from __future__ import annotations

import torch

from tio_megatron.kernels.linear.cpu import PackedWeight, linear_packed, matmul_strided

__all__ = ["PackedWeight", "linear", "matmul"]


def linear(x: torch.Tensor, w: torch.Tensor | PackedWeight, *, leaves: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x @ w.T`` in the order of ``leaves``. No autograd.

    Args:
        x: ``[..., K]``, fp32 or bf16.
        w: ``[N, K]``, fp32 or bf16, or the same packed.
        leaves: equal leaves of the ``K`` axis (of this shard).
        out_dtype: fp32 or bf16; default that of ``x``. One rounding.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: shapes or dtypes do not fit, ``leaves`` does not divide ``K``, or the device has no kernel.
    """
    out_dtype = out_dtype or x.dtype
    n, k = w.shape if len(w.shape) == 2 else (0, -1)
    _check("linear", (x, w if isinstance(w, torch.Tensor) else w.packed), x.shape[-1] if x.dim() else -1, k, leaves, out_dtype)
    rows = x.reshape(-1, k)
    if isinstance(w, PackedWeight):
        y = linear_packed(rows, w.packed, n, leaves, out_dtype)
    else:
        y = matmul_strided(rows, w, leaves, out_dtype)
    return y.view(*x.shape[:-1], n)


def matmul(a: torch.Tensor, b: torch.Tensor, *, leaves: int = 1, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``a @ b.T`` of operands with any strides, for the backward: ``dX = matmul(dy, w.t())``, ``dW = matmul(dy.t(), x.t())``.

    Args:
        a: ``[M, K]``, fp32 or bf16.
        b: ``[N, K]``, fp32 or bf16.
        leaves: equal leaves of the ``K`` axis.
        out_dtype: fp32 or bf16.

    Returns:
        ``[M, N]``; +0 where there is no term.

    Raises:
        ValueError: as :func:`linear`.
    """
    _check("matmul", (a, b), a.shape[1] if a.dim() == 2 else -1, b.shape[1] if b.dim() == 2 else -2, leaves, out_dtype)
    return matmul_strided(a, b, leaves, out_dtype)


def _check(what: str, tensors: tuple[torch.Tensor, torch.Tensor], k_left: int, k_right: int, leaves: int, out_dtype: torch.dtype) -> None:
    left, right = tensors
    if k_left != k_right:
        raise ValueError(f"{what}: shapes {tuple(left.shape)} and {tuple(right.shape)} share no last axis; it must be [M, K] and [N, K]")
    if leaves < 1 or k_left % leaves:
        works = [n for n in (1, 2, 4, 8, 16, 32, 64) if k_left % n == 0]
        raise ValueError(f"{what}: {k_left} terms do not divide into {leaves} equal leaves; {works} would work")
    for dtype in (left.dtype, right.dtype, out_dtype):
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{what}: dtype {dtype} is not supported; use torch.float32 or torch.bfloat16")
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"{what}: no kernel for device {tensor.device}; supported is cpu")
