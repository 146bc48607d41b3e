"""SiLU and SwiGLU with stated rounding points. Elementwise: a value's place in a tensor never changes its bits."""

from __future__ import annotations

from torch import Tensor

from tio_megatron.kernels.operands import check_activations, check_shape, require
from tio_megatron.kernels.swiglu import cpu

__all__ = ["silu", "silu_backward", "swiglu", "swiglu_backward"]


def silu(x: Tensor) -> Tensor:
    """``round(x / (1 + exp(-x)))`` of fp32 or bf16 ``x``, any shape. Differentiable.

    Raises:
        ValueError: another type, or a device without kernels.
    """
    check_activations("silu", {"x": x})
    return cpu.silu(x)


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`silu`: ``round(dy * slope)``, fp32 inside."""
    check_activations("silu_backward", {"x": x, "dy": dy})
    check_shape("silu_backward", "dy", dy, *x.shape)
    return cpu.silu_backward(dy, x)


def swiglu(gate_up: Tensor) -> Tensor:
    """``gate_up[..., 2I]``, gate first, to ``round(silu(gate) * up)`` ``[..., I]``, with ``silu`` rounded first. Differentiable.

    Equal to ``silu(gate) * up`` in the activation type, byte for byte.

    Raises:
        ValueError: an odd last axis, another type, or a device without kernels.
    """
    check_activations("swiglu", {"gate_up": gate_up})
    _even("swiglu", gate_up)
    return cpu.swiglu(gate_up)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of :func:`swiglu`, ``[..., 2I]``."""
    check_activations("swiglu_backward", {"gate_up": gate_up, "dy": dy})
    _even("swiglu_backward", gate_up)
    check_shape("swiglu_backward", "dy", dy, *gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return cpu.swiglu_backward(dy, gate_up)


def _even(what: str, gate_up: Tensor) -> None:
    require(
        gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0, what, f"gate_up has shape {list(gate_up.shape)}; its last axis must be gate and up of equal length"
    )
