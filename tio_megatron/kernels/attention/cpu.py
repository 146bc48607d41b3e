"""Attention on the CPU, as the operators ``tio::attention``, ``tio::attention_backward``, ``tio::write_pages`` and ``tio::attention_paged``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.attention import reference
from tio_megatron.kernels.library import operator


def _attention_cpu(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return reference.attention(q, k, v, cu_q=cu_q, cu_k=cu_k, scale=scale)


def _backward_cpu(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.attention_backward(do, q, k, v, o, lse, cu_q=cu_q, cu_k=cu_k, scale=scale)


def _paged_cpu(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor) -> None:
    n = int(query_start_loc[-1])
    out[:n] = reference.attention_paged(q[:n], cache, block_table, seq_lens, query_start_loc, scale=scale)


attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float scale) -> (Tensor, Tensor)",
    _attention_cpu,
    fake=lambda q, k, v, cu_q, cu_k, scale: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)),
)
attention_backward = operator(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor cu_q, Tensor cu_k, float scale) -> (Tensor, Tensor, Tensor)",
    _backward_cpu,
    fake=lambda do, q, k, v, o, lse, cu_q, cu_k, scale: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)
write_pages = operator(
    "write_pages(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()", reference.write_pages, fake=lambda k, v, cache, slot_mapping: None
)
attention_paged = operator(
    "attention_paged(Tensor q, Tensor cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, float scale, Tensor(a!) out) -> ()",
    _paged_cpu,
    fake=lambda q, cache, block_table, seq_lens, query_start_loc, scale, out: None,
)


def _save(ctx, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _backward(ctx, do: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # type: ignore[no-untyped-def]
    return *attention_backward(do, *ctx.saved_tensors, ctx.scale), None, None, None


torch.library.register_autograd("tio::attention", _backward, setup_context=_save)
