"""The grouped products in Triton: the kernel of :mod:`..linear.triton`, whose programs find their expert in ``offsets`` on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.linear.triton import product


def grouped(x: Tensor, w: list[Tensor], offsets: Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> Tensor:
    """``tio::grouped``: ``x[R, K]`` sorted by expert, one ``[N, K]`` per expert."""
    return product(x, w, offsets, leaves, paired, out_dtype, "grouped linear")


def grouped_packed(x: Tensor, packed: Tensor, n: int, offsets: Tensor, leaves: int, out_dtype: torch.dtype) -> Tensor:
    """``tio::grouped_packed``: on an accelerator packed experts are ``[E, N, K]`` themselves."""
    return product(x, packed.unbind(), offsets, leaves, False, out_dtype, "grouped linear")


def grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """``tio::grouped_wgrad``: for each expert the product over its rows, one leaf; +0 for an expert without rows. Waits for ``offsets``."""
    edges = offsets.tolist()
    out = dy.new_zeros(len(edges) - 1, dy.shape[1], x.shape[1], dtype=torch.float32)
    for e, (lo, hi) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        if hi > lo:
            out[e] = product(dy[lo:hi].t(), (x[lo:hi].t(),), None, 1, False, torch.float32, "grouped wgrad")
    return out


KERNELS = {"grouped": grouped, "grouped_packed": grouped_packed, "grouped_wgrad": grouped_wgrad}
