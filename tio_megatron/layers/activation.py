"""The gated activation between the two products of an MLP; differentiable. Legend: ``I`` inner width."""

from __future__ import annotations

from typing import Any

import torch

from tio_megatron.kernels import swiglu as kernel


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` ``[..., 2 I]`` (gate first): silu is rounded to the dtype, then the product. Returns ``[..., I]``."""
    return _Swiglu.apply(gate_up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return kernel.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        return kernel.swiglu_backward(dy.contiguous(), gate_up)
