"""The products over ragged experts in the contract's order. Routing and the sum over experts live in their own operators.

Shapes: ``E`` local experts, ``R`` rows sorted by expert (``offsets[e]`` to ``offsets[e + 1]`` are those of expert ``e``, any may be
empty), ``N`` outputs, ``K`` terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.kernels import families
from tio_megatron.kernels.grouped.cpu import PackedExperts, grouped_packed, grouped_strided, grouped_wgrad_rows
from tio_megatron.kernels.library import TYPES
from tio_megatron.kernels.linear import refuse

__all__ = ["PackedExperts", "grouped_dgrad", "grouped_linear", "grouped_wgrad"]

Weights = Sequence[torch.Tensor] | torch.Tensor


def grouped_linear(x: torch.Tensor, w: PackedExperts | Weights, offsets: torch.Tensor, *, leaves: int, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Each expert's rows times its weight: ``y[r] = w[expert of r] @ x[r]``. No autograd.

    Args:
        x: ``[R, K]``, fp32 or bf16, rows sorted by expert.
        w: packed experts, ``[E, N, K]``, or one ``[N, K]`` of any strides per expert. Tensors are read where they lie.
        offsets: ``[E + 1]`` int64, ascending, from 0 to ``R``.
        leaves: equal leaves of the ``K`` axis (of this shard).
        out_dtype: fp32 or bf16; default that of ``x``. One rounding.

    Returns:
        ``[R, N]``.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit, or ``leaves`` does not divide ``K``.
    """
    out_dtype = out_dtype or x.dtype
    if not isinstance(w, PackedExperts):
        return _product("grouped linear", x, list(w), offsets, leaves, False, out_dtype)
    _check("grouped linear", x, w.packed, tuple(w.shape[1:]), w.shape[0], offsets, leaves, False, out_dtype)
    return grouped_packed(x, w.packed, w.shape[1], offsets, leaves, out_dtype)


def grouped_dgrad(
    dy: torch.Tensor, w: Weights, offsets: torch.Tensor, *, leaves: int, paired: bool = False, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gradient of the rows: ``dx[r] = dy[r] @ w[expert of r]``, a product over the output axis.

    Args:
        dy: ``[R, N]``, fp32 or bf16.
        w: ``[E, N, K]`` or one ``[N, K]`` per expert.
        offsets: as :func:`grouped_linear`.
        leaves: equal leaves of the ``N`` axis.
        paired: the ``N`` axis is ``[gate; up]``; leaf ``j`` is leaf ``j`` of gate, then leaf ``j`` of up.
        out_dtype: fp32 or bf16; default that of ``dy``.

    Returns:
        ``[R, K]``.

    Raises:
        ValueError: as :func:`grouped_linear`, or ``paired`` and ``leaves`` does not divide half of ``N``.
    """
    return _product("grouped dgrad", dy, [one.t() for one in w], offsets, leaves, paired, out_dtype or dy.dtype)


def grouped_wgrad(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Gradient of the weights: for each expert the sum over its rows of ``dy[r]`` times ``x[r]``, one leaf, rows ascending.

    Args:
        dy: ``[R, N]``, fp32 or bf16.
        x: ``[R, K]``, fp32 or bf16.
        offsets: as :func:`grouped_linear`.

    Returns:
        ``[E, N, K]`` fp32; +0 for an expert without rows.

    Raises:
        ValueError: shapes, dtypes or offsets do not fit.
    """
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[0] != x.shape[0]:
        raise ValueError(f"grouped wgrad: {tuple(dy.shape)} and {tuple(x.shape)} are not [R, N] and [R, K]")
    _check("grouped wgrad", x, dy, (dy.shape[1], x.shape[1]), offsets.shape[0] - 1 if offsets.dim() == 1 else 0, offsets, 1, False, torch.float32)
    return grouped_wgrad_rows(dy, x, offsets)


def _product(what: str, x: torch.Tensor, w: list[torch.Tensor], offsets: torch.Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> torch.Tensor:
    if not w:
        raise ValueError(f"{what}: at least one expert is needed")
    for one in w:
        if one.shape != w[0].shape or one.dtype != w[0].dtype or one.dim() != 2:
            raise ValueError(f"{what}: experts differ: {tuple(w[0].shape)} {w[0].dtype} and {tuple(one.shape)} {one.dtype}; they must be alike [N, K]")
    _check(what, x, w[0], tuple(w[0].shape), len(w), offsets, leaves, paired, out_dtype)
    return grouped_strided(x, w, offsets, leaves, paired, out_dtype)


def _check(
    what: str,
    x: torch.Tensor,
    w: torch.Tensor,
    shape: tuple[int, ...],
    experts: int,
    offsets: torch.Tensor,
    leaves: int,
    paired: bool,
    out_dtype: torch.dtype,
) -> None:
    fits = x.dim() == 2 and x.shape[1] == shape[1] and leaves > 0 and shape[1] % (leaves << paired) == 0
    typed = x.dtype in TYPES and w.dtype in TYPES and out_dtype in TYPES
    if not fits or not typed or not (x.is_cpu or families.serves("grouped", x.device.type)) or x.device != w.device:
        refuse(what, x, w, shape, leaves, out_dtype, paired)
    if experts < 1 or offsets.dtype != torch.int64 or tuple(offsets.shape) != (experts + 1,):
        raise ValueError(f"{what}: offsets must be int64 of shape [E + 1] for {experts} experts, got {offsets.dtype} {tuple(offsets.shape)}")
