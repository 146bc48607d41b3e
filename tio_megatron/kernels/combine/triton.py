"""The sum of a token's expert rows in Triton: the bytes of ``reference.py``. A program lays a token's rows at their leaves and folds the node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.contract.tree import next_power_of_two
from tio_megatron.kernels import triton_family
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.operands import dense_last
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

CHAIN = FAMILIES["triton-sm90"].fields["row_chain"]
CELLS = 4096
"""Leaves times columns that a program holds."""


@triton.jit
def _combine(
    rows,
    index,
    ids,
    probs,
    out,
    stride,
    top_k,
    h,
    start,
    WEIGHTED: tl.constexpr,
    LEAVES: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The node of ``LEAVES`` experts from ``start`` on, of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    leaf = tl.arange(0, LEAVES)
    leaves = tl.broadcast_to(m.absent(), [BLOCK, LEAVES])
    for j in range(top_k):
        place = tl.load(index + token * top_k + j)
        expert = tl.load(ids + token * top_k + j)
        here = place >= 0
        row = tl.load(rows + place * stride + column, mask=here & (column < h), other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(probs + token * top_k + j)
        leaves = tl.where(here & (leaf[None, :] == expert - start), row[:, None], leaves)
    tl.store(out + token * h + column, m.tree_last(leaves, BLOCK, LEAVES, LEVELS), mask=column < h)


@triton.jit
def _backward(
    dout,
    rows,
    index,
    probs,
    drows,
    dprobs,
    dout_stride,
    stride,
    h,
    WEIGHTED: tl.constexpr,
    CHAIN: tl.constexpr,
    CHAINS: tl.constexpr,
    LEVELS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One choice of one token."""
    choice = tl.program_id(0).to(tl.int64)
    token = choice // TOP_K
    place = tl.load(index + choice)
    if place < 0:
        if WEIGHTED:
            tl.store(dprobs + choice, 0.0)
        return
    for first in range(0, h, BLOCK):
        column = first + tl.arange(0, BLOCK)
        d = tl.load(dout + token * dout_stride + column, mask=column < h, other=0.0).to(tl.float32)
        if WEIGHTED:
            d = d * tl.load(probs + choice)
        tl.store(drows + place * h + column, d.to(drows.dtype.element_ty), mask=column < h)
    if WEIGHTED:
        chain = tl.arange(0, CHAINS)
        total = tl.zeros([1, CHAINS], tl.float32)
        for j in range(CHAIN):
            column = (chain * CHAIN + j)[None, :]
            d = tl.load(dout + token * dout_stride + column, mask=column < h, other=0.0).to(tl.float32)
            row = tl.load(rows + place * stride + column, mask=column < h, other=0.0).to(tl.float32)
            total = tl.where(column < h, tl.fma(d, row, total), total)
        total = tl.where(chain[None, :] * CHAIN < h, total, m.absent())
        tl.store(dprobs + choice + tl.arange(0, 1), m.tree_last(total, 1, CHAINS, LEVELS))


def combine(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, experts: int, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """``tio::combine``: ``[F, T, H]`` fp32; index and ids are trusted (looking at them would wait for the device)."""
    rows, index, ids = dense_last(rows), index.contiguous(), ids.contiguous()
    (tokens, top_k), h = index.shape, rows.shape[1]
    out = rows.new_empty(len(starts), tokens, h, dtype=torch.float32)
    weights = index if probs is None else probs.contiguous()
    for node, start, size in zip(out, starts, sizes, strict=True):
        leaves = min(size, next_power_of_two(experts))
        cells = leaves if triton_family.small(rows.device.type) else CELLS
        block = max(1, min(cells // leaves, triton.next_power_of_2(h)))
        levels = leaves.bit_length() - 1
        meta = {"WEIGHTED": probs is not None, "LEAVES": leaves, "LEVELS": levels, "BLOCK": block}
        if node.numel():
            _combine[(tokens, triton.cdiv(h, block))](rows, index, ids, weights, node, rows.stride(0), top_k, h, start, **meta, **TWO_ROUNDINGS)
    return out


def combine_backward(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """``tio::combine_backward``; the index is trusted to name no row twice."""
    dout, rows, index = dense_last(dout), dense_last(rows), index.contiguous()
    top_k, h = index.shape[1], rows.shape[1]
    drows = rows.new_zeros(rows.shape)
    dprobs = rows.new_empty(0 if probs is None else index.shape, dtype=torch.float32)
    chains = triton.next_power_of_2(triton.cdiv(h, CHAIN))
    meta = {"WEIGHTED": probs is not None, "CHAIN": CHAIN, "CHAINS": chains, "LEVELS": chains.bit_length() - 1, "TOP_K": top_k}
    if index.numel():
        weights = index if probs is None else probs.contiguous()
        strides = (dout.stride(0), rows.stride(0), h)
        _backward[(index.numel(),)](dout, rows, index, weights, drows, dprobs, *strides, **meta, BLOCK=1024, **TWO_ROUNDINGS)
    return drows, dprobs


KERNELS = {"combine": combine, "combine_backward": combine_backward}
