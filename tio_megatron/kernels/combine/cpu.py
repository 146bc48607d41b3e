"""Combining expert rows on the CPU (``csrc/combine.cpp``), as the operators ``tio::combine`` and ``tio::combine_backward``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads, type_code
from tio_megatron.kernels.operands import dense_last

_forward = bind("tio_combine", pointer, integer, size, size, size, pointer, pointer, pointer, size, size, size, pointer, pointer, size, pointer, integer)
_gradient = bind("tio_combine_backward", pointer, integer, size, pointer, integer, size, size, size, pointer, pointer, size, size, pointer, pointer, integer)

_REFUSED = {
    2: "index names a row past the {rows} rows",
    3: "ids names an expert outside 0 .. {last}",
    4: "the ids of a token must ascend (each expert at most once)",
}


def _combine_cpu(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, experts: int, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    rows, index, ids = dense_last(rows), index.contiguous(), ids.contiguous()
    probs = None if probs is None else probs.contiguous()
    (tokens, top_k), nodes = index.shape, len(starts)
    out = rows.new_empty(nodes, tokens, rows.shape[1], dtype=torch.float32)
    code = _forward(
        rows.data_ptr(),
        type_code(rows, "rows"),
        rows.stride(0),
        *rows.shape,
        index.data_ptr(),
        ids.data_ptr(),
        None if probs is None else probs.data_ptr(),
        tokens,
        top_k,
        experts,
        (ctypes.c_int64 * nodes)(*starts),
        (ctypes.c_int64 * nodes)(*sizes),
        nodes,
        out.data_ptr(),
        threads(),
    )
    if code:
        raise ValueError("combine: " + _REFUSED[code].format(rows=rows.shape[0], last=experts - 1))
    return out


def _backward_cpu(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    dout, rows, index = dense_last(dout), dense_last(rows), index.contiguous()
    probs = None if probs is None else probs.contiguous()
    drows = rows.new_empty(rows.shape)
    dprobs = rows.new_empty(0 if probs is None else index.shape, dtype=torch.float32)
    code = _gradient(
        dout.data_ptr(),
        type_code(dout, "dout"),
        dout.stride(0),
        rows.data_ptr(),
        type_code(rows, "rows"),
        rows.stride(0),
        *rows.shape,
        index.data_ptr(),
        None if probs is None else probs.data_ptr(),
        *index.shape,
        drows.data_ptr(),
        None if probs is None else dprobs.data_ptr(),
        threads(),
    )
    if code:
        raise ValueError(f"combine_backward: {'index names a row twice' if code == 3 else _REFUSED[2].format(rows=rows.shape[0])}")
    return drows, dprobs


def _backward_fake(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(0 if probs is None else index.shape, dtype=torch.float32)


combine = operator(
    "combine(Tensor rows, Tensor index, Tensor ids, Tensor? probs, int experts, int[] starts, int[] sizes) -> Tensor",
    _combine_cpu,
    fake=lambda rows, index, ids, probs, experts, starts, sizes: rows.new_empty(len(starts), index.shape[0], rows.shape[1], dtype=torch.float32),
)
combine_backward = operator("combine_backward(Tensor dout, Tensor rows, Tensor index, Tensor? probs) -> (Tensor, Tensor)", _backward_cpu, fake=_backward_fake)
