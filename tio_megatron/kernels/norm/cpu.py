"""RMSNorm on the CPU: calls into ``csrc/norm.cpp``, as the operators ``tio::rms_norm``, ``tio::add_rms_norm`` and ``tio::rms_norm_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, real, size, threads, type_code
from tio_megatron.kernels.operands import rows_of

_forward = bind("tio_rms_norm", pointer, pointer, pointer, pointer, pointer, integer, size, size, pointer, integer, real, pointer, integer)
_gradient = bind("tio_rms_norm_backward", pointer, pointer, pointer, pointer, integer, size, size, pointer, integer, real, pointer, pointer, integer)


def _rms_norm_cpu(x: Tensor, w: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    x, count, layout = rows_of(x)
    w = w.contiguous()
    _forward(x.data_ptr(), layout, None, None, None, type_code(x, "x"), count, x.shape[-1], w.data_ptr(), type_code(w, "w"), eps, y.data_ptr(), threads())
    return y


def _add_rms_norm_cpu(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    x, count, layout = rows_of(x)
    residual, _, residual_layout = rows_of(residual)
    w = w.contiguous()
    code, w_code = type_code(x, "x"), type_code(w, "w")
    _forward(
        x.data_ptr(),
        layout,
        residual.data_ptr(),
        residual_layout,
        total.data_ptr(),
        code,
        count,
        x.shape[-1],
        w.data_ptr(),
        w_code,
        eps,
        y.data_ptr(),
        threads(),
    )
    return y, total


def _rms_norm_backward_cpu(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx, dw = x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)
    dy, _, dy_layout = rows_of(dy)
    x, count, layout = rows_of(x)
    w = w.contiguous()
    code, w_code = type_code(x, "x"), type_code(w, "w")
    _gradient(dy.data_ptr(), dy_layout, x.data_ptr(), layout, code, count, x.shape[-1], w.data_ptr(), w_code, eps, dx.data_ptr(), dw.data_ptr(), threads())
    return dx, dw


rms_norm = operator("rms_norm(Tensor x, Tensor w, float eps) -> Tensor", _rms_norm_cpu, fake=lambda x, w, eps: x.new_empty(x.shape))
add_rms_norm = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps) -> (Tensor, Tensor)",
    _add_rms_norm_cpu,
    fake=lambda x, residual, w, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor w, float eps) -> (Tensor, Tensor)",
    _rms_norm_backward_cpu,
    fake=lambda dy, x, w, eps: (x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)),
)


def _save(ctx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    x, w, ctx.eps = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    x, w = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy, x, w, ctx.eps)
    return dx, dw.to(w.dtype), None


def _save_add(ctx, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    _, _, w, ctx.eps = inputs
    ctx.save_for_backward(output[1], w)


def _backward_add(ctx, dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    total, w = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy, total, w, ctx.eps)
    dx = dx + dtotal
    return dx, dx, dw.to(w.dtype), None


torch.library.register_autograd("tio::rms_norm", _backward, setup_context=_save)
torch.library.register_autograd("tio::add_rms_norm", _backward_add, setup_context=_save_add)
