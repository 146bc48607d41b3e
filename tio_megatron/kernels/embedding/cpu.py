"""Vocabulary embedding on the CPU, as the operators ``tio::embedding`` and ``tio::embedding_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.embedding import reference
from tio_megatron.kernels.library import operator

embedding = operator(
    "embedding(Tensor ids, Tensor w, int first_row) -> Tensor", reference.embedding, fake=lambda ids, w, first_row: w.new_empty(*ids.shape, w.shape[1])
)
embedding_backward = operator(
    "embedding_backward(Tensor dout, Tensor ids, int rows, int first_row) -> Tensor",
    reference.embedding_backward,
    fake=lambda dout, ids, rows, first_row: dout.new_empty(rows, dout.shape[-1], dtype=torch.float32),
)


def _save(ctx, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ids, w, ctx.first_row = inputs
    ctx.rows, ctx.dtype = w.shape[0], w.dtype
    ctx.save_for_backward(ids)


def _backward(ctx, dout: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[no-untyped-def]
    return None, embedding_backward(dout, *ctx.saved_tensors, ctx.rows, ctx.first_row).to(ctx.dtype), None


torch.library.register_autograd("tio::embedding", _backward, setup_context=_save)
