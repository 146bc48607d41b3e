"""Rotary embedding in Triton: elementwise, the bytes of ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels.operands import dense_last
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS


@triton.jit
def _rope(
    x, positions, table, y, tokens, heads, x_token, x_head, width, half, INVERSE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < tokens * heads
    token, head = row // heads, row % heads
    column = tl.arange(0, HALF)
    inside = here[:, None] & (column[None, :] < half)
    place = tl.load(positions + token, mask=here, other=0)[:, None] * (2 * half) + column[None, :]
    cos = tl.load(table + place, mask=inside, other=0.0)
    sin = tl.load(table + place + half, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    at = (token * x_token + head * x_head)[:, None] + column[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    out = row[:, None] * width + column[None, :]
    tl.store(y + out, tl.fma(a, cos, -(b * sin)).to(y.dtype.element_ty), mask=inside)
    tl.store(y + out + half, tl.fma(b, cos, a * sin).to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        kept = 2 * half + tl.arange(0, REST)
        inside = here[:, None] & (kept[None, :] < width)
        value = tl.load(x + (token * x_token + head * x_head)[:, None] + kept[None, :], mask=inside, other=0.0)
        tl.store(y + row[:, None] * width + kept[None, :], value, mask=inside)


def rope(x: Tensor, positions: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """``tio::rope``; the positions are trusted (looking at them would wait for the device)."""
    x, positions, table = dense_last(x), positions.contiguous(), table.contiguous()
    y = x.new_empty(x.shape)
    tokens, heads, width = x.shape
    half = table.shape[1] // 2
    rest = triton.next_power_of_2(width - 2 * half) if width > 2 * half else 0
    rows = 32
    if y.numel():
        _rope[(triton.cdiv(tokens * heads, rows),)](
            x,
            positions,
            table,
            y,
            tokens,
            heads,
            x.stride(0),
            x.stride(1),
            width,
            half,
            INVERSE=inverse,
            ROWS=rows,
            HALF=triton.next_power_of_2(half),
            REST=rest,
            **TWO_ROUNDINGS,
        )
    return y


KERNELS = {"rope": rope}
