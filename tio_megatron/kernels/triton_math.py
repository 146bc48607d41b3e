"""Arithmetic that Triton kernels share: exp and log of ``math/reference.py``, and the tree inside a program. Launches nothing.

Functions of ``@triton.jit`` are compiled into the kernels that call them. ``tl.fma`` is one rounding; everything else is compiled without
contraction (:mod:`.triton_family`), so each operator written is one rounding, as in the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tio_megatron.kernels.math import reference

_LOG2E = tl.constexpr(reference.LOG2E)
_LN2_HI = tl.constexpr(reference.LN2_HI)
_LN2_LO = tl.constexpr(reference.LN2_LO)
_MAGIC = tl.constexpr(reference.MAGIC)
_LOW, _HIGH = tl.constexpr(reference.EXP_LOW), tl.constexpr(reference.EXP_HIGH)
_E0, _E1, _E2, _E3, _E4 = (tl.constexpr(c) for c in reference.EXP)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (tl.constexpr(c) for c in reference.LOG)
_SQRT_HALF = tl.constexpr(reference.SQRT_HALF_BITS)
_TINY = tl.constexpr(2.0**-126)


@triton.jit
def exp(x):
    """e to the power of fp32 ``x``, the bits of ``math/reference.py``."""
    clamped = tl.where(x < _LOW, _LOW, tl.where(x > _HIGH, _HIGH, x))
    n = tl.fma(clamped, _LOG2E, _MAGIC) - _MAGIC
    rough = tl.fma(n, -_LN2_HI, clamped)
    r = tl.fma(n, -_LN2_LO, rough)
    r_error = tl.fma(n, -_LN2_LO, rough - r)
    head = 1.0 + r
    square = r * r
    tail = tl.fma(tl.fma(r, r, -square), 0.5, tl.fma(r_error, head, r - (head - 1.0)))
    poly = tl.fma(tl.fma(tl.fma(tl.fma(r, _E0, _E1), r, _E2), r, _E3), r, _E4)
    y = head + tl.fma(square, 0.5, tl.fma(poly, square * r, tail))
    whole = tl.where(x == x, n, 0.0).to(tl.int32)
    half = whole >> 1
    return y * _power_of_two(half) * _power_of_two(whole - half)


@triton.jit
def _power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log(x):
    """Natural logarithm of fp32 ``x``, the bits of ``math/reference.py``."""
    small = x < _TINY
    bits = tl.where(small, x * 8388608.0, x).to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF) >> 23
    y = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    n = e.to(tl.float32) - tl.where(small, 23.0, 0.0)
    square = y * y
    poly = tl.fma(tl.fma(tl.fma(tl.fma(y, _L0, _L1), y, _L2), y, _L3), y, _L4)
    poly = tl.fma(tl.fma(tl.fma(tl.fma(poly, y, _L5), y, _L6), y, _L7), y, _L8)
    tail = tl.fma(n, _LN2_LO, poly * y * square)
    result = tl.fma(n, _LN2_HI, y + tl.fma(square, -0.5, tail))
    result = tl.where(x == float("inf"), x, result)
    return tl.where(x == 0.0, float("-inf"), tl.where((x < 0.0) | (x != x), float("nan"), result))


@triton.jit
def tree_last(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """``x[ROWS, WIDTH]`` summed over its last axis by the tree, ``WIDTH = 2 ** LEVELS``; absent places hold -0. ``[ROWS]``.

    Neighbours are added level by level, as written: a library's reduction would add in an order of its own.
    """
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, [ROWS, WIDTH >> (level + 1), 2]))
        x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit
def absent():
    """-0, what an absent node is filled with: adding it changes no value. Made from its bits: the literal ``-0.0`` compiles to +0."""
    return tl.full([], -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def larger(x, y):
    """The larger one; a NaN does not count, unless both are."""
    return tl.where((x > y) | (y != y), x, y)
