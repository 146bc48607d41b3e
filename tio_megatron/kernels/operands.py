"""What operators accept, and the words in which they refuse. No arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16)


def require(condition: bool, what: str, message: str) -> None:
    """Refuse with a ``ValueError`` that names the operator ``what``."""
    if not condition:
        raise ValueError(f"{what}: {message}")


def check_activations(what: str, tensors: Mapping[str, Tensor]) -> None:
    """All on the CPU (or meta), fp32 or bf16, and of one type, the first one's."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        check_device(what, name, tensor)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{what}: {name} is {tensor.dtype}; use torch.float32 or torch.bfloat16")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{what}: {name} is {tensor.dtype}, but {next(iter(tensors))} is {first.dtype}; they must be the same")


def check_dtype(what: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """On the CPU (or meta) and of an allowed type."""
    check_device(what, name, tensor)
    if tensor.dtype not in allowed:
        raise ValueError(f"{what}: {name} is {tensor.dtype}; use {' or '.join(map(str, allowed))}")


def check_shape(what: str, name: str, tensor: Tensor, *shape: int) -> None:
    """The exact shape; -1 matches any length."""
    have = tensor.shape
    if have == shape:
        return
    if len(have) != len(shape) or any(want not in (-1, n) for want, n in zip(shape, have, strict=True)):
        wanted = ", ".join("*" if want == -1 else str(want) for want in shape)
        raise ValueError(f"{what}: {name} has shape {list(have)}; expected [{wanted}]")


def check_device(what: str, name: str, tensor: Tensor) -> None:
    """A device that some kernel family serves."""
    if not tensor.is_cpu and tensor.device.type != "meta":
        raise ValueError(f"{what}: {name} is on {tensor.device}; no kernel family serves that device, supported is cpu")


def dense_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def rows_of(tensor: Tensor) -> tuple[Tensor, int, Any]:
    """Rows (all axes but the last) as two nested loops: the tensor, their count, and ``{outer stride, inner count, inner stride}`` for C.

    Views such as the query heads inside a qkv product need no copy; a layout that is not two loops is copied once.
    """
    last = tensor.shape[-1]
    if tensor.is_contiguous():
        count = tensor.numel() // last if last else 0
        return tensor, count, (ctypes.c_int64 * 3)(0, max(count, 1), last)
    tensor = dense_last(tensor)
    axes: list[tuple[int, int]] = []
    for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * stride:
            axes[-1] = (axes[-1][0] * n, stride)
        else:
            axes.append((n, stride))
    if len(axes) > 2:
        return rows_of(tensor.contiguous())
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(axes)) + axes
    return tensor, outer * inner, (ctypes.c_int64 * 3)(outer_stride, max(inner, 1), inner_stride)
