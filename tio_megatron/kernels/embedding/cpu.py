"""Vocabulary embedding on the CPU (``csrc/embedding.cpp``), as the operators ``tio::embedding`` and ``tio::embedding_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads, type_code
from tio_megatron.kernels.operands import dense_last

_forward = bind("tio_embedding", pointer, size, pointer, size, size, size, size, size, pointer, integer)
_gradient = bind("tio_embedding_backward", pointer, integer, size, pointer, size, size, size, size, pointer, integer)


def _embedding_cpu(ids: Tensor, w: Tensor, first_row: int) -> Tensor:
    ids, w = ids.contiguous(), dense_last(w)
    out = w.new_empty(*ids.shape, w.shape[1])
    _forward(ids.data_ptr(), ids.numel(), w.data_ptr(), w.element_size(), w.stride(0), *w.shape, first_row, out.data_ptr(), threads())
    return out


def _embedding_backward_cpu(dout: Tensor, ids: Tensor, rows: int, first_row: int) -> Tensor:
    h = dout.shape[-1]
    dout, ids, dw = dout.contiguous(), ids.contiguous(), dout.new_empty(rows, h, dtype=torch.float32)
    _gradient(dout.data_ptr(), type_code(dout, "dout"), h, ids.data_ptr(), ids.numel(), rows, h, first_row, dw.data_ptr(), threads())
    return dw


embedding = operator(
    "embedding(Tensor ids, Tensor w, int first_row) -> Tensor", _embedding_cpu, fake=lambda ids, w, first_row: w.new_empty(*ids.shape, w.shape[1])
)
embedding_backward = operator(
    "embedding_backward(Tensor dout, Tensor ids, int rows, int first_row) -> Tensor",
    _embedding_backward_cpu,
    fake=lambda dout, ids, rows, first_row: dout.new_empty(rows, dout.shape[-1], dtype=torch.float32),
)


def _save(ctx, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ids, w, ctx.first_row = inputs
    ctx.rows, ctx.dtype = w.shape[0], w.dtype
    ctx.save_for_backward(ids)


def _backward(ctx, dout: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[no-untyped-def]
    return None, embedding_backward(dout, *ctx.saved_tensors, ctx.rows, ctx.first_row).to(ctx.dtype), None


torch.library.register_autograd("tio::embedding", _backward, setup_context=_save)
