"""RMSNorm in Triton: the bytes of ``reference.py``. A program has some rows; chains of 32 terms lie side by side in its lanes, then the tree.

A chain is walked by loading its j-th term in all chains at once, so a row is read with a stride; its cache lines stay in L1 for the 32 steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.kernels import triton_family
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.math.triton import tree_add
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

LANES = 512
"""Chains that a program walks at once, all its rows together."""


@triton.jit
def _chains(x, g, w, row, count, h, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, WEIGHTED: tl.constexpr):
    """``[ROWS]``: sum over the row of x * x, or (WEIGHTED) of round(g * w) * x: fma chains joined by the tree."""
    chain = tl.arange(0, CHAINS)
    total = tl.zeros([ROWS, CHAINS], tl.float32)
    for j in range(CHAIN):
        column = chain * CHAIN + j
        here = (row[:, None] < count) & (column[None, :] < h)
        at = row[:, None].to(tl.int64) * h + column[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(w + column, mask=column < h, other=0.0).to(tl.float32)
            other = tl.load(g + at, mask=here, other=0.0).to(tl.float32) * weight[None, :]
            total = tl.where(column[None, :] < h, tl.fma(other, value, total), total)
        else:
            total = tl.where(column[None, :] < h, tl.fma(value, value, total), total)
    total = tl.where(chain[None, :] * CHAIN < h, total, m.absent())
    return m.tree_last(total, ROWS, CHAINS, LEVELS)


@triton.jit
def _inverse(x, row, count, h, size, eps, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr):
    mean = tl.div_rn(_chains(x, x, x, row, count, h, CHAIN, ROWS, CHAINS, LEVELS, False), size)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _inverses(x, out, count, h, size, eps, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + row, _inverse(x, row, count, h, size, eps, CHAIN, ROWS, CHAINS, LEVELS), mask=row < count)


@triton.jit
def _sum(x, residual, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) + tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=here)


@triton.jit
def _forward(x, w, y, count, h, size, eps, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inverse = _inverse(x, row, count, h, size, eps, CHAIN, ROWS, CHAINS, LEVELS)
    for start in range(0, h, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = (row[:, None] < count) & (column[None, :] < h)
        at = row[:, None].to(tl.int64) * h + column[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * inverse[:, None]
        value = value * tl.load(w + column, mask=column < h, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    dy, x, w, dx, inverses, count, h, size, eps, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inverse = _inverse(x, row, count, h, size, eps, CHAIN, ROWS, CHAINS, LEVELS)
    tl.store(inverses + row, inverse, mask=row < count)
    factor = tl.div_rn(_chains(x, dy, w, row, count, h, CHAIN, ROWS, CHAINS, LEVELS, True), size)
    factor = factor * inverse * inverse
    for start in range(0, h, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = (row[:, None] < count) & (column[None, :] < h)
        at = row[:, None].to(tl.int64) * h + column[None, :]
        weighted = tl.load(dy + at, mask=here, other=0.0).to(tl.float32) * tl.load(w + column, mask=column < h, other=0.0).to(tl.float32)[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * factor[:, None]
        tl.store(dx + at, ((weighted - value) * inverse[:, None]).to(dx.dtype.element_ty), mask=here)


@triton.jit
def _weight(dy, x, inverses, parts, count, h, CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    """One chain of rows of the weight's gradient: ``parts[chain, h]``."""
    chain = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(chain * CHAIN, min(chain * CHAIN + CHAIN, count)):
        at = tl.cast(row, tl.int64) * h + column
        value = tl.load(x + at, mask=column < h, other=0.0).to(tl.float32) * tl.load(inverses + row)
        total = tl.fma(tl.load(dy + at, mask=column < h, other=0.0).to(tl.float32), value, total)
    tl.store(parts + chain.to(tl.int64) * h + column, total, mask=column < h)


CHAIN = FAMILIES["triton-sm90"].fields["row_chain"]


def _shape(x: Tensor) -> tuple[int, int, float, tuple[int], dict[str, int]]:
    """Rows, their length (also as fp32), the grid and the sizes of a program."""
    h = x.shape[-1]
    count = x.numel() // h
    chains = triton.next_power_of_2(triton.cdiv(h, CHAIN))
    rows = 1 if triton_family.small(x.device.type) else max(1, min(16, LANES // chains))
    sizes = {"CHAIN": CHAIN, "ROWS": rows, "CHAINS": chains, "LEVELS": chains.bit_length() - 1}
    sizes["BLOCK"] = min(triton.next_power_of_2(h), 2048 // rows)
    return count, h, float(h), (triton.cdiv(count, rows),), sizes


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of each row of contiguous ``x[..., H]``, flat, fp32."""
    count, h, size, grid, sizes = _shape(x)
    out = x.new_empty(count, dtype=torch.float32)
    if count:
        _inverses[grid](x, out, count, h, size, eps, **sizes, **TWO_ROUNDINGS)
    return out


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """``tio::rms_norm``: ``x[..., H]``, ``w[H]``."""
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty_like(x)
    count, h, size, grid, sizes = _shape(x)
    if count:
        _forward[grid](x, w, y, count, h, size, eps, **sizes, **TWO_ROUNDINGS)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``tio::add_rms_norm``: the sum is rounded first."""
    x, residual = x.contiguous(), residual.contiguous()
    total = torch.empty_like(x)
    if x.numel():
        _sum[(triton.cdiv(x.numel(), 1024),)](x, residual, total, x.numel(), BLOCK=1024, **TWO_ROUNDINGS)
    return rms_norm(total, w, eps), total


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``tio::rms_norm_backward``: ``dx`` in the type of x, ``dw[H]`` fp32."""
    dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    dx = torch.empty_like(x)
    count, h, size, grid, sizes = _shape(x)
    if not count:
        return dx, x.new_zeros(h, dtype=torch.float32)
    inverses = x.new_empty(count, dtype=torch.float32)
    _backward[grid](dy, x, w, dx, inverses, count, h, size, eps, **sizes, **TWO_ROUNDINGS)
    parts = x.new_empty(triton.cdiv(count, CHAIN), h, dtype=torch.float32)
    _weight[(triton.cdiv(h, 256), parts.shape[0])](dy, x, inverses, parts, count, h, CHAIN=CHAIN, BLOCK=256, **TWO_ROUNDINGS)
    return dx, tree_add(parts)


KERNELS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "rms_norm_backward": rms_norm_backward}
