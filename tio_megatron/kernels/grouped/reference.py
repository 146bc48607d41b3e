"""The grouped products' definition in plain torch: each expert's rows by :func:`tio_megatron.kernels.linear.reference.matmul`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.kernels.linear.reference import matmul

Weights = Sequence[torch.Tensor] | torch.Tensor


def grouped_linear(x: torch.Tensor, w: Weights, offsets: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    """``x[R, K]``, weights ``[N, K]`` and ``offsets[E + 1]`` to ``[R, N]``; rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert ``e``."""
    return torch.cat([matmul(x[lo:hi], w[e], leaves, out_dtype) for e, (lo, hi) in enumerate(_runs(offsets))])


def grouped_dgrad(dy: torch.Tensor, w: Weights, offsets: torch.Tensor, leaves: int, out_dtype: torch.dtype, paired: bool = False) -> torch.Tensor:
    """``dy[R, N]`` to ``dx[R, K]``: a product over the output axis."""
    return torch.cat([matmul(dy[lo:hi], w[e].t(), leaves, out_dtype, paired) for e, (lo, hi) in enumerate(_runs(offsets))])


def grouped_wgrad(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``dy[R, N]`` and ``x[R, K]`` to ``[E, N, K]`` fp32: per expert a product over its rows, one leaf."""
    return torch.stack([matmul(dy[lo:hi].t(), x[lo:hi].t()) for lo, hi in _runs(offsets)])


def _runs(offsets: torch.Tensor) -> list[tuple[int, int]]:
    bounds = offsets.tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))
