"""Exact sums over tokens in Triton. A grain's partial is the product's, block for block; counts are added as integers, so in any order.

A program owns a tile of a sum and walks the grains, so a product's targets are read and written once. The rows of an embedding meet in integer
atomics, the only ones in this family: integers have no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels.linear.triton import COLUMNS, OPTIONS, ROWS, TERMS
from tio_megatron.kernels.norm.triton import inverse_rms
from tio_megatron.kernels.operands import dense_last, require
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 256
NORM_ROWS = 64
_HALF_EVEN = tl.constexpr(1.5 * 2.0**52)
"""Added to a float64 below 2^51 it rounds it to a whole number, half to even."""


@triton.jit
def _power(n):
    """``2 ** n`` as float64."""
    return ((tl.cast(n, tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _low(value, unit, split):
    """What fp32 partials add to ``low``."""
    wide = value.to(tl.float64)
    small = tl.abs(wide) < _power(unit + split)
    return ((tl.where(small, wide, 0.0) * _power(-unit) + _HALF_EVEN) - _HALF_EVEN).to(tl.int64)


@triton.jit
def _high(value, unit, split):
    """What they add to ``high``."""
    wide = value.to(tl.float64)
    size = tl.abs(wide)
    large = (size >= _power(unit + split)) & (size < _power(unit + 2 * split - 24))
    return (tl.where(large, wide, 0.0) * _power(24 - unit - split)).to(tl.int64)


@triton.jit
def _size(value):
    """|value|; infinity for NaN."""
    return tl.where(value == value, tl.abs(value), float("inf"))


@triton.jit
def _grains(
    dy,
    x,
    starts,
    of,
    order,
    low,
    high,
    table,
    peaks,
    n,
    k,
    dy_row,
    dy_column,
    x_row,
    x_column,
    ORDERED: tl.constexpr,
    THREE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """One tile of one sum. ``table[e]``: where its low and high lie from the first ones', their row strides, its unit and split."""
    e = tl.program_id(2)
    low += tl.load(table + 6 * e)
    high += tl.load(table + 6 * e + 1)
    unit, split = tl.load(table + 6 * e + 4), tl.load(table + 6 * e + 5)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (i[:, None] < n) & (j[None, :] < k)
    low_at = i[:, None].to(tl.int64) * tl.load(table + 6 * e + 2) + j[None, :]
    high_at = i[:, None].to(tl.int64) * tl.load(table + 6 * e + 3) + j[None, :]
    total = tl.load(low + low_at, mask=here, other=0)
    peak = tl.zeros([ROWS, COLUMNS], tl.float32)
    for grain in range(tl.load(of + e), tl.load(of + e + 1)):
        first, stop = tl.load(starts + grain), tl.load(starts + grain + 1)
        value = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, stop, TERMS):
            term = start + tl.arange(0, TERMS)
            row = term
            if ORDERED:
                row = tl.load(order + term, mask=term < stop, other=0)
            left = tl.load(dy + row[None, :] * dy_row + i[:, None] * dy_column, mask=(term[None, :] < stop) & (i[:, None] < n), other=0.0)
            right = tl.load(x + row[:, None] * x_row + j[None, :] * x_column, mask=(term[:, None] < stop) & (j[None, :] < k), other=0.0)
            if THREE:
                upper = left.to(tl.bfloat16)
                rest = left - upper.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                value = tl.dot((rest - middle.to(tl.float32)).to(tl.bfloat16), right, value)
                value = tl.dot(middle, right, value)
                value = tl.dot(upper, right, value)
            else:
                value = tl.dot(left, right, value)
        total += _low(value, unit, split)
        more = _high(value, unit, split)
        if tl.max((more != 0).to(tl.int32)) > 0:
            tl.store(high + high_at, tl.load(high + high_at, mask=here, other=0) + more, mask=here)
        peak = tl.maximum(peak, _size(value))
    tl.store(low + low_at, total, mask=here)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + e * tl.num_programs(0) * tl.num_programs(1) + tile, tl.max(tl.where(here, peak, 0.0)))


@triton.jit
def _rows(rows, ids, low, high, peaks, stride, low_row, high_row, h, unit, split, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < h
    value = tl.load(rows + row * stride + at, mask=here, other=0.0).to(tl.float32)
    place = tl.load(ids + row)
    tl.atomic_add(low + place * low_row + at, _low(value, unit, split), mask=here)
    more = _high(value, unit, split)
    tl.atomic_add(high + place * high_row + at, more, mask=here & (more != 0))
    tl.store(peaks + row * tl.num_programs(1) + tl.program_id(1), tl.max(_size(value)))


@triton.jit
def _terms(dy, x, inverses, low, high, peaks, count, h, unit, split, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``low[chunk, h]`` and ``high[chunk, h]`` of a run of rows."""
    chunk = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    less = tl.zeros([BLOCK], tl.int64)
    more = less
    peak = tl.zeros([BLOCK], tl.float32)
    for row in range(chunk * ROWS, min(chunk * ROWS + ROWS, count)):
        place = tl.cast(row, tl.int64) * h + at
        value = tl.load(x + place, mask=at < h, other=0.0).to(tl.float32) * tl.load(inverses + row)
        value = tl.load(dy + place, mask=at < h, other=0.0).to(tl.float32) * value
        less += _low(value, unit, split)
        more += _high(value, unit, split)
        peak = tl.maximum(peak, _size(value))
    tl.store(low + chunk.to(tl.int64) * h + at, less, mask=at < h)
    tl.store(high + chunk.to(tl.int64) * h + at, more, mask=at < h)
    tl.store(peaks + chunk * tl.num_programs(0) + tl.program_id(0), tl.max(tl.where(at < h, peak, 0.0)))


@triton.jit
def _value(low, high, out, n, unit, split, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """``(high * 2 ** (split - 24) + low) * 2 ** unit``, rounded once: to odd on the way, which the last rounding undoes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    less = tl.load(low + at, mask=here, other=0)
    shift = tl.cast(split - 24, tl.int64)
    more = less >> shift
    rest = less - (more << shift)
    if HIGH:
        more += tl.load(high + at, mask=here, other=0)
    few, some = tl.abs(more) < (1 << 26), tl.abs(more) < (1 << 52)
    exact = ((tl.where(few, more, 0) << shift) + rest).to(tl.float64) * _power(unit)
    odd = more | (rest != 0).to(tl.int64)
    more_odd = (odd >> 11) | ((odd & 2047) != 0).to(tl.int64)
    wide = tl.where(some, odd, 0).to(tl.float64) * _power(unit + split - 24)
    widest = more_odd.to(tl.float64) * _power(unit + split - 24 + 11)
    tl.store(out + at, tl.where(few, exact, tl.where(some, wide, widest)).to(tl.float32), mask=here)


def add_products(
    low: list[Tensor],
    high: list[Tensor],
    peak: list[Tensor],
    unit: list[int],
    split: list[int],
    dy: Tensor,
    x: Tensor,
    starts: Tensor,
    of: Tensor,
    order: Tensor | None,
) -> None:
    """``tio::add_products``; ``starts``, ``of`` and ``order`` are trusted."""
    require(x.dtype == torch.bfloat16, "add_products", f"x is {x.dtype}; this kernel family multiplies torch.bfloat16")
    starts, of = (tensor.to(dy.device) for tensor in (starts, of))
    rows = starts if order is None else order.to(dy.device).contiguous()
    n, k, count = dy.shape[1], x.shape[1], len(low)
    if not (n and k):
        return
    entries = [
        ((a.data_ptr() - low[0].data_ptr()) // 8, (b.data_ptr() - high[0].data_ptr()) // 8, a.stride(0), b.stride(0), u, s)
        for a, b, u, s in zip(low, high, unit, split, strict=True)
    ]
    table = torch.tensor(entries, dtype=torch.int64, device=dy.device)
    tiles = (triton.cdiv(n, ROWS), triton.cdiv(k, COLUMNS))
    peaks = dy.new_zeros(count, tiles[0] * tiles[1], dtype=torch.float32)
    _grains[(*tiles, count)](
        *(dy, x, starts.contiguous(), of.contiguous(), rows, low[0], high[0], table, peaks, n, k, *dy.stride(), *x.stride()),
        ORDERED=order is not None,
        THREE=dy.dtype == torch.float32,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TERMS=TERMS,
        **OPTIONS,
    )
    for one, found in zip(peak, peaks.amax(1, keepdim=True), strict=True):
        torch.maximum(one, found, out=one)


def add_rows(low: Tensor, high: Tensor, peak: Tensor, unit: int, split: int, rows: Tensor, ids: Tensor) -> None:
    """``tio::add_rows``; ids are trusted."""
    rows, ids = dense_last(rows), ids.to(rows.device).contiguous()
    if rows.numel():
        grid = (rows.shape[0], triton.cdiv(rows.shape[1], BLOCK))
        peaks = rows.new_empty(grid, dtype=torch.float32)
        strides = (rows.stride(0), low.stride(0), high.stride(0), rows.shape[1])
        _rows[grid](rows, ids, low, high, peaks, *strides, unit, split, BLOCK=BLOCK, **TWO_ROUNDINGS)
        torch.maximum(peak, peaks.amax().view(1), out=peak)


def add_norm_terms(low: Tensor, high: Tensor, peak: Tensor, unit: int, split: int, dy: Tensor, x: Tensor, eps: float) -> None:
    """``tio::add_norm_terms``."""
    dy, x, h = dy.contiguous(), x.contiguous(), x.shape[-1]
    count = x.numel() // h
    if not count:
        return
    chunks, blocks = triton.cdiv(count, NORM_ROWS), triton.cdiv(h, BLOCK)
    less, more = low.new_empty(chunks, h), low.new_empty(chunks, h)
    peaks = x.new_empty(chunks, blocks, dtype=torch.float32)
    sizes = {"ROWS": NORM_ROWS, "BLOCK": BLOCK}
    _terms[(blocks, chunks)](dy, x, inverse_rms(x, eps), less, more, peaks, count, h, unit, split, **sizes, **TWO_ROUNDINGS)
    low += less.sum(0)
    high += more.sum(0)
    torch.maximum(peak, peaks.amax().view(1), out=peak)


def sum_value(low: Tensor, high: Tensor | None, unit: int, split: int, out: Tensor) -> None:
    """``tio::sum_value``; by way of memory of its own, since ``out`` may lie over ``low``."""
    if low.numel():
        found = torch.empty(low.shape, dtype=torch.float32, device=low.device)
        given = (low, low if high is None else high, found, low.numel(), unit, split)
        _value[(triton.cdiv(low.numel(), BLOCK),)](*given, HIGH=high is not None, BLOCK=BLOCK, **TWO_ROUNDINGS)
        out.copy_(found.view(out.shape))


KERNELS = {"add_products": add_products, "add_rows": add_rows, "add_norm_terms": add_norm_terms, "sum_value": sum_value}
