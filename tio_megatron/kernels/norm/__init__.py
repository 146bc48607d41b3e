"""RMSNorm. The residual sum that some engines fuse with it is here too, since where it is rounded changes every byte after it.

A row never sees another, so batch, packing, tiles and threads cannot change a byte. Shapes: ``H`` is the normalised axis.
"""

from __future__ import annotations

from torch import Tensor

from tio_megatron.kernels.norm import cpu
from tio_megatron.kernels.operands import check_activations, check_shape, require

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_backward"]


def _check(what: str, w: Tensor, **activations: Tensor) -> None:
    check_activations(what, activations)
    check_activations(what, {"w": w})
    x = activations["x"]
    require(x.dim() >= 1 and x.shape[-1] >= 1, what, f"x has shape {list(x.shape)}; the last axis must not be empty")
    check_shape(what, "w", w, x.shape[-1])
    for name, other in activations.items():
        check_shape(what, name, other, *x.shape)


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """``round((x / sqrt(mean(x^2) + eps)) * w)``: fp32 inside, the weight multiplied before the one rounding. Differentiable.

    Args:
        x: ``[..., H]`` fp32 or bf16; leading axes may be strided (heads inside a qkv product).
        w: ``[H]`` fp32 or bf16.
        eps: added to the mean.

    Returns:
        ``[..., H]`` contiguous, in the type of ``x``.

    Raises:
        ValueError: shapes, types or device do not fit.
    """
    _check("rms_norm", w, x=x)
    return cpu.rms_norm(x, w, eps)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``new = round(x + residual)`` and ``rms_norm(new)``: the variance is that of the rounded sum. Differentiable.

    Args and errors as :func:`rms_norm`; ``residual`` has the shape and type of ``x``.

    Returns:
        ``(y, new)``.
    """
    _check("add_rms_norm", w, x=x, residual=residual)
    return cpu.add_rms_norm(x, residual, w, eps)


def rms_norm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rms_norm`: ``dx[..., H]`` in the type of x, ``dw[H]`` fp32 (sum over all rows, ascending, by chains and tree)."""
    _check("rms_norm_backward", w, x=x, dy=dy)
    return cpu.rms_norm_backward(dy, x, w, eps)
