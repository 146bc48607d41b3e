"""SiLU and SwiGLU, defined: one rounding after SiLU, one after the product."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.exact import fma
from tio_megatron.kernels.math import reference as m


def silu(x: Tensor) -> Tensor:
    """``round(x / (1 + exp(-x)))`` in the type of x."""
    f = x.float()
    return (f / (1.0 + m.exp(-f))).to(x.dtype)


def silu_slope(x: Tensor) -> Tensor:
    """The derivative in fp32: ``s * fma(x, 1 - s, 1)`` with ``s = 1 / (1 + exp(-x))``."""
    f = x.float()
    s = m.sigmoid(f)
    return s * fma(f, 1.0 - s, f.new_tensor(1.0))


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """``round(dy * slope(x))``."""
    return (dy.float() * silu_slope(x)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``gate_up[..., 2I]``, gate first -> ``round(silu(gate) * up)`` ``[..., I]``."""
    gate, up = gate_up.chunk(2, -1)
    return (silu(gate).float() * up.float()).to(gate_up.dtype)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient ``[..., 2I]``: gate ``round((dy * up) * slope(gate))``, up ``round(dy * silu(gate))``."""
    gate, up = gate_up.chunk(2, -1)
    d = dy.float()
    dgate = ((d * up.float()) * silu_slope(gate)).to(gate_up.dtype)
    dup = (d * silu(gate).float()).to(gate_up.dtype)
    return torch.cat([dgate, dup], -1)
