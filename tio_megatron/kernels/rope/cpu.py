"""Rotary embedding on the CPU (``csrc/elementwise.cpp``), as the operator ``tio::rope``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads, type_code
from tio_megatron.kernels.operands import require, rows_of

_rope = bind("tio_rope", pointer, pointer, integer, size, size, size, pointer, pointer, size, size, integer, pointer, integer)


def _rope_cpu(x: Tensor, positions: Tensor, table: Tensor, inverse: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if not y.numel():
        return y
    x, _, layout = rows_of(x)
    positions, table = positions.contiguous(), table.contiguous()
    rows, half = table.shape[0], table.shape[1] // 2
    code = type_code(x, "x")
    found = _rope(x.data_ptr(), layout, code, *x.shape, positions.data_ptr(), table.data_ptr(), rows, half, inverse, y.data_ptr(), threads())
    require(not found, "rope", f"positions reach {int(positions.min())} .. {int(positions.max())}; the table has the positions 0 .. {rows - 1}")
    return y


rope = operator(
    "rope(Tensor x, Tensor positions, Tensor table, bool inverse) -> Tensor",
    _rope_cpu,
    fake=lambda x, positions, table, inverse: x.new_empty(x.shape),
    names=("rope_backward",),
)


def _save(ctx, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    _, positions, table, ctx.inverse = inputs
    ctx.save_for_backward(positions, table)


def _backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
    return rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


torch.library.register_autograd("tio::rope", _backward, setup_context=_save)
