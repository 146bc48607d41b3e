"""Makes Triton's interpreter round as a GPU does, so that bytes it gives mean something.

Triton 3.7.1 interprets with numpy, which knows no bfloat16: it multiplies the bit patterns of bf16 operands in ``tl.dot``, cuts fp32 to bf16 instead
of rounding half to even, and rounds ``tl.fma`` twice. Here ``tl.dot`` takes 16 terms at a time (the depth of the GPU's instruction), adds them
to the accumulator exactly (float64) and rounds to fp32 once: not the GPU's rounding, but like it a function of one row, one column and the
order of the blocks alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DEPTH = 16


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 to fp32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to uint16, half to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of fp32 with one rounding: the exact product in float64, the sum rounded to odd, then to fp32."""
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    with np.errstate(all="ignore"):
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = np.ascontiguousarray(np.broadcast_to(total, error.shape)).view(np.int64)
        inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
        bits = np.where(inexact, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
        return bits.view(np.float64).astype(np.float32)


def _cast(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return TensorHandle(src.data, target)
    if source == tl.bfloat16:
        return _plain(self, TensorHandle(from_bf16(src.data), tl.float32), dst_type)
    if target == tl.bfloat16:
        return TensorHandle(to_bf16(src.data.astype(np.float32)), target)
    return _plain(self, src, dst_type)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: Any) -> TensorHandle:
    assert a.dtype.scalar == b.dtype.scalar == tl.bfloat16 and d.dtype.scalar == tl.float32, "bf16 operands, fp32 sums"
    left, right, total = from_bf16(a.data).astype(np.float64), from_bf16(b.data).astype(np.float64), d.data
    with np.errstate(all="ignore"):
        for k in range(0, left.shape[-1], DEPTH):
            total = (total + left[..., k : k + DEPTH] @ right[..., k : k + DEPTH, :]).astype(np.float32)
    return TensorHandle(total, tl.float32)


def _fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    assert z.dtype.scalar == tl.float32
    return TensorHandle(fma(x.data, y.data, z.data), tl.float32)


def _binary(self: Any, left: TensorHandle, right: TensorHandle, op: Any) -> TensorHandle:
    done = _plain_binary(self, left, right, op)
    return TensorHandle(done.data, tl.int1) if done.data.dtype == np.bool_ else done


def _fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding: Any) -> TensorHandle:
    return _cast(self, src, dst_type)


_plain = InterpreterBuilder.cast_impl
_plain_binary = InterpreterBuilder.binary_op


def install() -> None:
    """Replace them in this process. (A comparison's type, too: 3.9 takes that of its operands, and then refuses it as a mask.)"""
    InterpreterBuilder.binary_op = _binary  # type: ignore[method-assign]
    InterpreterBuilder.cast_impl = _cast  # type: ignore[method-assign]
    InterpreterBuilder.create_dot = _dot  # type: ignore[method-assign]
    InterpreterBuilder.create_fma = _fma  # type: ignore[method-assign]
    InterpreterBuilder.create_fp_to_fp = _fp_to_fp  # type: ignore[method-assign]
