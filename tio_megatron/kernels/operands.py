"""What operators accept, and the words in which they refuse. No arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

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
    if tensor.dim() != len(shape) or any(want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("*" if want == -1 else str(want) for want in shape)
        raise ValueError(f"{what}: {name} has shape {list(tensor.shape)}; expected [{wanted}]")


def check_device(what: str, name: str, tensor: Tensor) -> None:
    """A device that some kernel family serves."""
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"{what}: {name} is on {tensor.device}; no kernel family serves that device, supported is cpu")


def dense_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def row_layout(tensor: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Rows (all axes but the last) as two nested loops: ``tensor, outer, outer_stride, inner, inner_stride``.

    Views such as the query heads inside a qkv product need no copy; any other layout is copied once.
    """
    tensor = dense_last(tensor)
    shape, stride = list(tensor.shape[:-1]), list(tensor.stride()[:-1])
    axes: list[tuple[int, int]] = []
    for n, s in zip(shape, stride, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * s:
            axes[-1] = (axes[-1][0] * n, s)
        else:
            axes.append((n, s))
    if len(axes) > 2:
        return row_layout(tensor.contiguous())
    axes = [(1, 0)] * (2 - len(axes)) + axes
    (outer, outer_stride), (inner, inner_stride) = axes
    return tensor, outer, outer_stride, inner, inner_stride
