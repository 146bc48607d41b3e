"""The grouped product's definition in plain torch: each expert's rows by :func:`tio_megatron.kernels.linear.reference.matmul`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.kernels.linear.reference import matmul


def grouped_linear(x: torch.Tensor, w: Sequence[torch.Tensor] | torch.Tensor, offsets: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    """``x[R, K]``, weights ``[N, K]`` and ``offsets[E + 1]`` to ``[R, N]``; rows ``offsets[e]`` to ``offsets[e + 1]`` belong to expert ``e``."""
    bounds = offsets.tolist()
    return torch.cat([matmul(x[lo:hi], w[e], leaves, out_dtype) for e, (lo, hi) in enumerate(zip(bounds, bounds[1:], strict=False))])
