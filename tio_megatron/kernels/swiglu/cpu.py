"""SiLU and SwiGLU on the CPU, as the operators ``tio::silu``, ``tio::swiglu`` and their backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import operator
from tio_megatron.kernels.swiglu import reference


def _like_last(x: Tensor, last: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], last)


silu = operator("silu(Tensor x) -> Tensor", reference.silu, fake=lambda x: x.new_empty(x.shape))
silu_backward = operator("silu_backward(Tensor dy, Tensor x) -> Tensor", reference.silu_backward, fake=lambda dy, x: x.new_empty(x.shape))
swiglu = operator("swiglu(Tensor gate_up) -> Tensor", reference.swiglu, fake=lambda x: _like_last(x, x.shape[-1] // 2))
swiglu_backward = operator("swiglu_backward(Tensor dy, Tensor gate_up) -> Tensor", reference.swiglu_backward, fake=lambda dy, x: x.new_empty(x.shape))


def _save(ctx, inputs: tuple[Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward_silu(ctx, dy: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return silu_backward(dy, *ctx.saved_tensors)


def _backward_swiglu(ctx, dy: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    return swiglu_backward(dy, *ctx.saved_tensors)


torch.library.register_autograd("tio::silu", _backward_silu, setup_context=_save)
torch.library.register_autograd("tio::swiglu", _backward_swiglu, setup_context=_save)
