"""The matrix product in the contract's order. What cuts it over ranks lives in ``layers``; ragged experts in ``kernels.grouped``.

Each output element is its own sum: rows, columns, tiles, threads and instruction sets never change a byte, only ``K`` and ``leaves``
do. Shapes: ``M`` rows, ``N`` outputs, ``K`` terms.

A weight given as a tensor is read where it lies, at every call, so no copy of it can go stale. (A copy kept by ``data_ptr`` and
``_version`` would: writes through ``.data``, as Megatron's optimizers make them, do not change the version.) A weight given as a
:class:`PackedWeight` is read faster when there are few rows; its owner refreshes it with ``update_``.
"""

from __future__ import annotations

import torch

from tio_megatron.kernels import families
from tio_megatron.kernels.library import TYPES
from tio_megatron.kernels.linear.cpu import PackedWeight, linear_packed, matmul_strided

__all__ = ["PackedWeight", "linear", "matmul", "refuse"]


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
    shape, kept = x.shape, w.packed if isinstance(w, PackedWeight) else w
    out_dtype = out_dtype or x.dtype
    if not shape or len(w.shape) != 2 or shape[-1] != w.shape[1] or leaves < 1 or shape[-1] % leaves or not _served(x, kept, out_dtype):
        refuse("linear", x, kept, tuple(w.shape), leaves, out_dtype)
    rows = x.reshape(-1, shape[-1]) if len(shape) != 2 else x
    y = linear_packed(rows, kept, w.shape[0], leaves, out_dtype) if kept is not w else matmul_strided(rows, kept, leaves, False, out_dtype)
    return y if len(shape) == 2 else y.view(*shape[:-1], w.shape[0])


def matmul(a: torch.Tensor, b: torch.Tensor, *, leaves: int = 1, paired: bool = False, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``a @ b.T`` of operands with any strides, for the backward: ``dX = matmul(dy, w.t())``, ``dW = matmul(dy.t(), x.t())``.

    Args:
        a: ``[M, K]``, fp32 or bf16.
        b: ``[N, K]``, fp32 or bf16.
        leaves: equal leaves of the ``K`` axis.
        paired: the ``K`` axis is two halves ``[gate; up]``; leaf ``j`` is leaf ``j`` of the first, then leaf ``j`` of the second.
        out_dtype: fp32 or bf16.

    Returns:
        ``[M, N]``; +0 where there is no term.

    Raises:
        ValueError: as :func:`linear`, or ``paired`` and ``leaves`` does not divide half of ``K``.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or leaves < 1 or a.shape[1] % (leaves << paired) or not _served(a, b, out_dtype):
        refuse("matmul", a, b, tuple(b.shape), leaves, out_dtype, paired)
    return matmul_strided(a, b, leaves, paired, out_dtype)


def _served(x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> bool:
    return x.dtype in TYPES and w.dtype in TYPES and out_dtype in TYPES and (x.is_cpu or families.serves("matmul", x.device.type)) and x.device == w.device


def refuse(what: str, x: torch.Tensor, w: torch.Tensor, shape: tuple[int, ...], leaves: int, out_dtype: torch.dtype, paired: bool = False) -> None:
    """Say which argument of a product does not fit and what would.

    Raises:
        ValueError: always.
    """
    if not x.dim() or len(shape) < 2 or x.shape[-1] != shape[-1]:
        raise ValueError(f"{what}: shapes {tuple(x.shape)} and {shape} share no last axis; they must be [.., K] and [N, K]")
    for dtype in (x.dtype, w.dtype, out_dtype):
        if dtype not in TYPES:
            raise ValueError(f"{what}: dtype {dtype} is not supported; use torch.float32 or torch.bfloat16")
    terms = x.shape[-1]
    if leaves < 1 or terms % (leaves << paired):
        works = [n for n in (1, 2, 4, 8, 16, 32, 64) if terms % (n << paired) == 0]
        raise ValueError(f"{what}: {terms} terms{' in two halves' if paired else ''} do not divide into {leaves} equal leaves; {works} would work")
    raise ValueError(f"{what}: no kernel for operands on {x.device} and {w.device}; both must be on one of: {', '.join(families.devices('matmul'))}")
