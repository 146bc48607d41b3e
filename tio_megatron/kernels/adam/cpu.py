"""Adam on the CPU (``csrc/adam.cpp``), as the operator ``tio::adam_``."""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.autograd.graph import increment_version

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads

_adam = bind("tio_adam", pointer, pointer, pointer, pointer, pointer, size, pointer, integer, integer)


def _adam_cpu(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor | None, numbers: list[float], decoupled: bool) -> None:
    scalars = (ctypes.c_float * 8)(*numbers)  # a conversion from float64, so one rounding
    to = None if out is None else out.data_ptr()
    _adam(weight.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), to, weight.numel(), scalars, decoupled, threads())
    increment_version([written for written in (weight, exp_avg, exp_avg_sq, out) if written is not None])


adam_ = operator(
    "adam_(Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? out, float[] numbers, bool decoupled) -> ()",
    _adam_cpu,
    fake=lambda weight, grad, exp_avg, exp_avg_sq, out, numbers, decoupled: None,
    names=("adam",),
)
