"""Sums of squares (``csrc/squares.cpp``) and scaling (``csrc/adam.cpp``) on the CPU, as the operators ``tio::add_squares_`` and ``tio::scale_``."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import increment_version

from tio_megatron.kernels.library import bind, integer, operator, pointer, real, size, threads

_squares = bind("tio_add_squares", pointer, size, pointer, integer)
_scale = bind("tio_scale", pointer, size, real, integer)


def _add_squares_cpu(total: Tensor, x: Tensor) -> None:
    x = x.contiguous()
    _squares(x.data_ptr(), x.numel(), total.data_ptr(), threads())
    increment_version(total)


def _scale_cpu(x: Tensor, factor: float) -> None:
    _scale(x.data_ptr(), x.numel(), factor, threads())
    increment_version(x)


add_squares_ = operator("add_squares_(Tensor(a!) total, Tensor x) -> ()", _add_squares_cpu, fake=lambda total, x: None)
scale_ = operator("scale_(Tensor(a!) x, float factor) -> ()", _scale_cpu, fake=lambda x, factor: None)
