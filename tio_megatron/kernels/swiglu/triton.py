"""SiLU and SwiGLU in Triton: elementwise, the bytes of ``reference.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 1024


@triton.jit
def _slope(x):
    """The derivative of SiLU."""
    s = tl.div_rn(1.0, 1.0 + m.exp(-x))
    return s * tl.fma(x, 1.0 - s, 1.0)


@triton.jit
def _silu(x, dy, y, n, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if GRADIENT:
        result = tl.load(dy + at, mask=here, other=0.0).to(tl.float32) * _slope(value)
    else:
        result = tl.div_rn(value, 1.0 + m.exp(-value))
    tl.store(y + at, result.to(y.dtype.element_ty), mask=here)


@triton.jit
def _swiglu(x, dy, y, n, width, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    first = at // width * 2 * width + at % width
    gate = tl.load(x + first, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + first + width, mask=here, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + m.exp(-gate)).to(y.dtype.element_ty).to(tl.float32)
    if GRADIENT:
        d = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
        tl.store(y + first, ((d * up) * _slope(gate)).to(y.dtype.element_ty), mask=here)
        tl.store(y + first + width, (d * silu).to(y.dtype.element_ty), mask=here)
    else:
        tl.store(y + at, (silu * up).to(y.dtype.element_ty), mask=here)


def silu(x: Tensor) -> Tensor:
    """``tio::silu``."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _silu[(triton.cdiv(x.numel(), BLOCK),)](x, x, y, x.numel(), GRADIENT=False, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return y


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``tio::silu_backward``."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        _silu[(triton.cdiv(x.numel(), BLOCK),)](x, dy, dx, x.numel(), GRADIENT=True, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return dx


def swiglu(gate_up: Tensor) -> Tensor:
    """``tio::swiglu``: ``[..., 2 I]`` to ``[..., I]``."""
    x, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    if y.numel():
        _swiglu[(triton.cdiv(y.numel(), BLOCK),)](x, x, y, y.numel(), width, GRADIENT=False, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return y


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """``tio::swiglu_backward``."""
    dy, x = dy.contiguous(), gate_up.contiguous()
    dx = torch.empty_like(x)
    if dy.numel():
        _swiglu[(triton.cdiv(dy.numel(), BLOCK),)](x, dy, dx, dy.numel(), x.shape[-1] // 2, GRADIENT=True, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return dx


KERNELS = {"silu": silu, "silu_backward": silu_backward, "swiglu": swiglu, "swiglu_backward": swiglu_backward}
