"""Attention on the CPU (``csrc/attention.cpp``, ``attention_backward.cpp``), as ``tio::attention``, its backward, ``write_pages`` and ``attention_paged``."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, real, size, threads, type_code
from tio_megatron.kernels.operands import dense_last, require

_forward = bind("tio_attention", *[pointer] * 6, integer, pointer, pointer, size, size, size, integer, real, pointer, pointer, integer)
_gradient = bind("tio_attention_backward", *[pointer] * 11, integer, pointer, pointer, size, size, size, integer, real, pointer, pointer, pointer, integer)
_write = bind("tio_write_pages", *[pointer] * 4, integer, size, pointer, size, size, size, size, integer, pointer, integer)
_paged = bind(
    "tio_attention_paged",
    *(pointer, pointer, integer, size),
    *(pointer, size, size, size, size, integer),
    *(pointer, size, size, pointer, pointer),
    *(size, size, real, pointer, pointer, integer),
)


def _heads(tensor: Tensor) -> tuple[Tensor, Any]:
    """``[tokens, heads, D]`` with a contiguous last axis, and its two strides for C."""
    tensor = dense_last(tensor)
    return tensor, (ctypes.c_int64 * 2)(*tensor.stride()[:2])


def _attention_cpu(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    (q, q_strides), (k, k_strides), (v, v_strides) = _heads(q), _heads(k), _heads(v)
    cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    _forward(
        *(q.data_ptr(), q_strides, k.data_ptr(), k_strides, v.data_ptr(), v_strides, type_code(q, "q")),
        *(cu_q.data_ptr(), cu_k.data_ptr(), cu_q.numel() - 1, q.shape[1], k.shape[1], q.shape[2], scale),
        *(o.data_ptr(), lse.data_ptr(), threads()),
    )
    return o, lse


def _backward_cpu(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    (do, do_strides), (o, o_strides), (q, q_strides), (k, k_strides), (v, v_strides) = map(_heads, (do, o, q, k, v))
    lse, cu_q, cu_k = lse.contiguous(), cu_q.contiguous(), cu_k.contiguous()
    _gradient(
        *(do.data_ptr(), do_strides, q.data_ptr(), q_strides, k.data_ptr(), k_strides, v.data_ptr(), v_strides, o.data_ptr(), o_strides),
        *(lse.data_ptr(), type_code(q, "q"), cu_q.data_ptr(), cu_k.data_ptr(), cu_q.numel() - 1, q.shape[1], k.shape[1], q.shape[2], scale),
        *(dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), threads()),
    )
    return dq, dk, dv


def _write_cpu(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    (k, k_strides), (v, v_strides), slots = _heads(k), _heads(v), slot_mapping.contiguous()
    pages, heads, page, width = cache.shape
    code = _write(
        *(k.data_ptr(), k_strides, v.data_ptr(), v_strides, type_code(k, "k"), slots.numel()),
        *(cache.data_ptr(), cache.stride(0), pages, heads, page, width // 2, slots.data_ptr(), threads()),
    )
    require(not code, "write_pages", f"slot_mapping reaches {int(slots.max()) if slots.numel() else 0}; the cache has the slots 0 .. {pages * page - 1}")


_REFUSED = {
    2: "query_start_loc does not ascend within the {tokens} rows of q",
    3: "seq_lens must be at least a sequence's query rows, and at most {keys}, the keys its row of block_table can hold",
    4: "block_table names a page outside 0 .. {last}",
}


def _paged_cpu(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor) -> None:
    (q, q_strides), table = _heads(q), dense_last(block_table)
    lengths, starts = seq_lens.contiguous(), query_start_loc.contiguous()
    pages, groups, page, width = cache.shape
    code = _paged(
        *(q.data_ptr(), q_strides, type_code(q, "q"), q.shape[0]),
        *(cache.data_ptr(), cache.stride(0), pages, groups, page, width // 2),
        *(table.data_ptr(), table.stride(0), table.shape[1], lengths.data_ptr(), starts.data_ptr()),
        *(starts.numel() - 1, q.shape[1], scale, out.data_ptr(), (ctypes.c_int64 * 2)(*out.stride()[:2]), threads()),
    )
    if code:
        raise ValueError("attention_paged: " + _REFUSED[code].format(tokens=q.shape[0], keys=table.shape[1] * page, last=pages - 1))


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
write_pages = operator("write_pages(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping) -> ()", _write_cpu, fake=lambda k, v, cache, slot_mapping: None)
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
