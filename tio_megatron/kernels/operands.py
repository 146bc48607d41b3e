"""What operators accept, and the words in which they refuse. No arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels import families

FLOATS = (torch.float32, torch.bfloat16)


def require(condition: bool, what: str, message: str) -> None:
    """Refuse with a ``ValueError`` that names the operator ``what``."""
    if not condition:
        raise ValueError(f"{what}: {message}")


def check_activations(what: str, tensors: Mapping[str, Tensor]) -> None:
    """All on a device with a kernel of ``what``, of a type that its family takes, and of one type, the first one's."""
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        check_device(what, name, tensor)
        if tensor.dtype not in FLOATS or not (tensor.is_cpu or _takes(what, tensor)):
            raise ValueError(f"{what}: {name} is {tensor.dtype}; use {_operands(what, tensor)}")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{what}: {name} is {tensor.dtype}, but {next(iter(tensors))} is {first.dtype}; they must be the same")


def check_dtype(what: str, name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """On a device with a kernel of ``what``, and of an allowed type."""
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
    """A device for which ``what`` has a kernel. The CPU always has one."""
    if not tensor.is_cpu and not families.serves(what, tensor.device.type):
        raise ValueError(f"{what}: {name} is on {tensor.device}; {families.supported(what, tensor.device.type)}")


def _takes(what: str, tensor: Tensor) -> bool:
    family = families.family_on(what, tensor.device.type)
    return family is None or str(tensor.dtype).removeprefix("torch.") in family.operands


def _operands(what: str, tensor: Tensor) -> str:
    family = None if tensor.is_cpu else families.family_on(what, tensor.device.type)
    return " or ".join(f"torch.{name}" for name in family.operands) if family else "torch.float32 or torch.bfloat16"


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
