"""SiLU and SwiGLU on the CPU (``csrc/elementwise.cpp``), as the operators ``tio::silu``, ``tio::swiglu`` and their backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads, type_code

_silu = bind("tio_silu", pointer, integer, pointer, size, integer)
_silu_gradient = bind("tio_silu_backward", pointer, pointer, integer, pointer, size, integer)
_swiglu = bind("tio_swiglu", pointer, integer, pointer, size, size, integer)
_swiglu_gradient = bind("tio_swiglu_backward", pointer, pointer, integer, pointer, size, size, integer)


def _silu_cpu(x: Tensor) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    _silu(x.data_ptr(), type_code(x, "x"), y.data_ptr(), x.numel(), threads())
    return y


def _silu_backward_cpu(dy: Tensor, x: Tensor) -> Tensor:
    dy, x, dx = dy.contiguous(), x.contiguous(), x.new_empty(x.shape)
    _silu_gradient(dy.data_ptr(), x.data_ptr(), type_code(x, "x"), dx.data_ptr(), x.numel(), threads())
    return dx


def _swiglu_cpu(gate_up: Tensor) -> Tensor:
    x, n = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], n)
    if y.numel():
        _swiglu(x.data_ptr(), type_code(x, "gate_up"), y.data_ptr(), y.numel() // n, n, threads())
    return y


def _swiglu_backward_cpu(dy: Tensor, gate_up: Tensor) -> Tensor:
    dy, x = dy.contiguous(), gate_up.contiguous()
    n, dx = x.shape[-1] // 2, x.new_empty(x.shape)
    if dy.numel():
        _swiglu_gradient(dy.data_ptr(), x.data_ptr(), type_code(x, "gate_up"), dx.data_ptr(), dy.numel() // n, n, threads())
    return dx


silu = operator("silu(Tensor x) -> Tensor", _silu_cpu, fake=lambda x: x.new_empty(x.shape))
silu_backward = operator("silu_backward(Tensor dy, Tensor x) -> Tensor", _silu_backward_cpu, fake=lambda dy, x: x.new_empty(x.shape))
swiglu = operator("swiglu(Tensor gate_up) -> Tensor", _swiglu_cpu, fake=lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
swiglu_backward = operator("swiglu_backward(Tensor dy, Tensor gate_up) -> Tensor", _swiglu_backward_cpu, fake=lambda dy, x: x.new_empty(x.shape))


def _save(ctx, inputs: tuple[Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward_silu(ctx, dy: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return silu_backward(dy, *ctx.saved_tensors)


def _backward_swiglu(ctx, dy: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return swiglu_backward(dy, *ctx.saved_tensors)


torch.library.register_autograd("tio::silu", _backward_silu, setup_context=_save)
torch.library.register_autograd("tio::swiglu", _backward_swiglu, setup_context=_save)
