"""Elementary functions and sums over a stack of tensors, for those who need them outside an op. Nothing here knows a model."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.math import cpu
from tio_megatron.kernels.operands import check_dtype, require

__all__ = ["exp", "log", "tree_add"]


def exp(x: Tensor) -> Tensor:
    """e to the power of each fp32 element; the same bits whatever the element's place. No autograd.

    Raises:
        ValueError: not fp32, or a device without kernels.
    """
    check_dtype("exp", "x", x, torch.float32)
    return cpu.exp(x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of each fp32 element. No autograd.

    Raises:
        ValueError: not fp32, or a device without kernels.
    """
    check_dtype("log", "x", x, torch.float32)
    return cpu.log(x)


def tree_add(parts: Tensor) -> Tensor:
    """``parts[P, ...]`` fp32 summed over the first axis by ``ReductionTree(P)``, in one pass over memory. No autograd.

    Raises:
        ValueError: not fp32, no part, or a device without kernels.
    """
    check_dtype("tree_add", "parts", parts, torch.float32)
    require(parts.dim() >= 1 and parts.shape[0] >= 1, "tree_add", f"parts has shape {list(parts.shape)}; it needs at least one part")
    return cpu.tree_add(parts)
