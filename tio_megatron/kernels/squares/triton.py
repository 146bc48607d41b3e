"""The exact sum of squares and clipping's product in Triton: integers, so the order is free; the limbs are those of the CPU's kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 1024
PROGRAMS = 512
LIMBS = 18
_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _squares(x, parts, n, LIMBS: tl.constexpr, BLOCK: tl.constexpr):
    """``parts[program]``: 18 limbs of 32 bits, how many were infinite, how many NaN."""
    program = tl.program_id(0)
    place = tl.arange(0, 32)
    total = tl.zeros([32], tl.int64)
    for start in range(program * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = tl.load(x + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        fraction = bits & 0x7FFFFF
        finite = exponent < 255
        mantissa = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
        square = tl.where(finite, mantissa * mantissa, 0)
        # In units of 2 ** -298 it stands 2 * exponent - 2 bits up: an even number, so nothing reaches a sign.
        up = 2 * tl.maximum(exponent, 1) - 2
        shift, limb = (up & 31).to(tl.int64), up >> 5
        low, high = (square & _MASK) << shift, (square >> 32) << shift
        for i in tl.static_range(LIMBS):
            own = tl.where(limb == i, low & _MASK, 0) + tl.where(limb == i - 1, (low >> 32) + (high & _MASK), 0) + tl.where(limb == i - 2, high >> 32, 0)
            total += tl.where(place == i, tl.sum(own, 0), 0)
        total += tl.where(place == LIMBS, tl.sum(((exponent == 255) & (fraction == 0)).to(tl.int64), 0), 0)
        total += tl.where(place == LIMBS + 1, tl.sum(((exponent == 255) & (fraction != 0)).to(tl.int64), 0), 0)
    tl.store(parts + program * (LIMBS + 2) + place, total, mask=place < LIMBS + 2)


@triton.jit
def _carry(added, total, LIMBS: tl.constexpr):
    """``total += added``, each limb but the last below ``2 ** 32`` again."""
    carry = tl.zeros([], tl.int64)
    for i in range(LIMBS - 1):
        value = tl.load(total + i) + tl.load(added + i) + carry
        tl.store(total + i, value & _MASK)
        carry = value >> 32
    last = LIMBS - 1 + tl.arange(0, 4)
    given = tl.load(total + last, mask=last < LIMBS + 2, other=0) + tl.load(added + last, mask=last < LIMBS + 2, other=0)
    tl.store(total + last, given + tl.where(last == LIMBS - 1, carry, 0), mask=last < LIMBS + 2)


@triton.jit
def _scale(x, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n, other=0.0) * factor, mask=at < n)


def add_squares_(total: Tensor, x: Tensor) -> None:
    """``tio::add_squares_``."""
    x = x.contiguous()
    if x.numel():
        parts = total.new_empty(min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)), LIMBS + 2)
        _squares[(len(parts),)](x, parts, x.numel(), LIMBS=LIMBS, BLOCK=BLOCK)
        _carry[(1,)](parts.sum(0, dtype=torch.int64), total, LIMBS=LIMBS, num_warps=1)
    increment_version(total)


def scale_(x: Tensor, factor: float) -> None:
    """``tio::scale_``: the factor becomes fp32 with one rounding as it is passed."""
    if x.numel():
        _scale[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), float(factor), BLOCK=BLOCK, **TWO_ROUNDINGS)
    increment_version(x)


KERNELS = {"add_squares_": add_squares_, "scale_": scale_}
