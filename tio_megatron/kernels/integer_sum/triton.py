"""Exact sums over tokens in Triton. A grain's partial is the product's, block for block; counts are added as integers, so in any order.

A program owns a tile of a sum and walks the grains, so a product's targets are read and written once. The rows of an embedding meet in integer
atomics, the only ones in this family: integers have no order. Nothing here is float64, which an NPU has not: an fp32 number is a whole number and
a power of two, and every rounding is a shift.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels import triton_family
from tio_megatron.kernels.linear.triton import COLUMNS, OPTIONS, ROWS, TERMS
from tio_megatron.kernels.norm.triton import inverse_rms
from tio_megatron.kernels.operands import dense_last, require
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 256
NORM_ROWS = 64
SMALL_ROWS = 16
"""Of a product's tile where tiles must be small: an NPU's vector buffer holds that many rows of integers beside their parts."""
_FRACTION = tl.constexpr(0x7FFFFF)
_ONE = tl.constexpr(1 << 23)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _apart(value):
    """fp32 as whole numbers: ``mantissa * 2 ** (exponent - 150)`` without its sign, and the bits. An infinity or NaN has exponent 255."""
    bits = value.to(tl.int32, bitcast=True)
    field = (bits >> 23) & 255
    mantissa = tl.where(field > 0, (bits & _FRACTION) | _ONE, bits & _FRACTION)
    return mantissa, tl.maximum(field, 1), bits


@triton.jit
def _below(mantissa, exponent, power):
    """Whether the number is below ``2 ** power``; no infinity or NaN is."""
    up = tl.minimum(tl.maximum(power + 150 - exponent, 0), 24)
    return (exponent < 255) & (mantissa < (tl.full(mantissa.shape, 1, tl.int32) << up))


@triton.jit
def _low(value, unit, split):
    """What fp32 partials add to ``low``: whole counts of ``2 ** unit``, half to even. Integers alone, so it needs no float64."""
    unit, split = tl.cast(unit, tl.int32), tl.cast(split, tl.int32)
    mantissa, exponent, bits = _apart(value)
    mantissa = tl.where(_below(mantissa, exponent, unit + split), mantissa, 0)
    up = exponent - 150 - unit
    # 25 places down nothing is left: a mantissa is below half of 2 ** 25.
    down = tl.minimum(tl.maximum(-up, 1), 25)
    kept = mantissa >> down
    one = tl.full(mantissa.shape, 1, tl.int32)
    kept = (mantissa + (one << (down - 1)) - 1 + (kept & 1)) >> down
    count = tl.where(up < 0, kept, mantissa).to(tl.int64) << tl.minimum(tl.maximum(up, 0), 50).to(tl.int64)
    return tl.where(bits < 0, -count, count)


@triton.jit
def _high(value, unit, split):
    """What they add to ``high``: nothing is lost, since an fp32 number that large is a whole multiple of its count."""
    unit, split = tl.cast(unit, tl.int32), tl.cast(split, tl.int32)
    mantissa, exponent, bits = _apart(value)
    large = _below(mantissa, exponent, unit + 2 * split - 24) & (_below(mantissa, exponent, unit + split) == 0)
    up = tl.minimum(tl.maximum(exponent - 126 - unit - split, 0), 50)
    count = tl.where(large, mantissa, 0).to(tl.int64) << up.to(tl.int64)
    return tl.where(bits < 0, -count, count)


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
def _bits_of(size, unit):
    """fp32 bits of ``size * 2 ** unit``, rounded once, half to even; ``size`` int64, not negative. Subnormals and infinity included."""
    length, rest = tl.zeros(size.shape, tl.int32), size
    for step in tl.static_range(6):
        longer = (rest >> (32 >> step)) != 0
        length += tl.where(longer, 32 >> step, 0)
        rest = tl.where(longer, rest >> (32 >> step), rest)
    length += (rest != 0).to(tl.int32)
    last = tl.maximum(length + unit - 24, -149)  # the exponent of the last place that fp32 has here
    drop = last - unit
    down = tl.minimum(tl.maximum(drop, 1), 63).to(tl.int64)
    kept = size >> down
    lost, half = size - (kept << down), tl.full(size.shape, 1, tl.int64) << (down - 1)
    kept += ((lost > half) | ((lost == half) & ((kept & 1) == 1))).to(tl.int64)
    kept = tl.where(drop > 63, 0, kept)
    exact = size << tl.minimum(tl.maximum(-drop, 0), 24).to(tl.int64)
    digits = tl.where(drop > 0, kept, exact).to(tl.int32)
    # The hidden bit is counted into the exponent, and so is a carry out of the last rounding.
    found = (tl.minimum(last + 149, 253) << 23) + digits
    found = tl.where(last > 104, _INFINITE, found)
    return tl.where(size == 0, 0, found)


@triton.jit
def _value(low, high, out, n, unit, split, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """``(high * 2 ** (split - 24) + low) * 2 ** unit``, rounded once, in integers: 90 bits as two numbers, of which the lower one is a last bit at most."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    less = tl.load(low + at, mask=here, other=0)
    unit, places = tl.cast(unit, tl.int32), tl.cast(split - 24, tl.int32)
    shift = tl.cast(places, tl.int64)
    more = less >> shift
    rest = less - (more << shift)
    if HIGH:
        more += tl.load(high + at, mask=here, other=0)
    negative = more < 0
    borrow = negative & (rest != 0)
    more = tl.where(negative, -more, more) - borrow.to(tl.int64)
    rest = tl.where(borrow, (tl.full(rest.shape, 1, tl.int64) << shift) - rest, rest)
    # With 26 bits of its own and more, all that the rest can do is to say that something is there.
    few = more < (1 << 26)
    size = tl.where(few, (tl.where(few, more, 0) << shift) + rest, more | (rest != 0).to(tl.int64))
    bits = _bits_of(size, tl.where(few, unit, unit + places))
    bits = tl.where(negative, bits | -2147483648, bits)
    tl.store(out + at, bits.to(tl.int32).to(tl.float32, bitcast=True), mask=here)


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
    height = SMALL_ROWS if triton_family.small(dy.device.type) else ROWS
    tiles = (triton.cdiv(n, height), triton.cdiv(k, COLUMNS))
    peaks = dy.new_zeros(count, tiles[0] * tiles[1], dtype=torch.float32)
    _grains[(*tiles, count)](
        *(dy, x, starts.contiguous(), of.contiguous(), rows, low[0], high[0], table, peaks, n, k, *dy.stride(), *x.stride()),
        ORDERED=order is not None,
        THREE=dy.dtype == torch.float32,
        ROWS=height,
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
