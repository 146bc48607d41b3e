"""RMSNorm on the CPU, as the operators ``tio::rms_norm``, ``tio::add_rms_norm`` and ``tio::rms_norm_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import operator
from tio_megatron.kernels.norm import reference

rms_norm = operator("rms_norm(Tensor x, Tensor w, float eps) -> Tensor", reference.rms_norm, fake=lambda x, w, eps: x.new_empty(x.shape))
add_rms_norm = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor w, float eps) -> (Tensor, Tensor)",
    reference.add_rms_norm,
    fake=lambda x, residual, w, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
rms_norm_backward = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor w, float eps) -> (Tensor, Tensor)",
    reference.rms_norm_backward,
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
