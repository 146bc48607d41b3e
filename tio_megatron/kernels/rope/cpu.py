"""Rotary embedding on the CPU, as the operator ``tio::rope``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import operator
from tio_megatron.kernels.rope import reference


def _rope_cpu(x: Tensor, positions: Tensor, table: Tensor, inverse: bool) -> Tensor:
    return reference.rope(x, positions, table, inverse=inverse)


rope = operator(
    "rope(Tensor x, Tensor positions, Tensor table, bool inverse) -> Tensor", _rope_cpu, fake=lambda x, positions, table, inverse: x.new_empty(x.shape)
)


def _save(ctx, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    _, positions, table, ctx.inverse = inputs
    ctx.save_for_backward(positions, table)


def _backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
    return rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


torch.library.register_autograd("tio::rope", _backward, setup_context=_save)
