"""Gradients under megatron-core's DDP: fp32 partial sums go straight into its fp32 buffers.

``finalize_model_grads`` stays stock: what our layers hand over is partial on each rank exactly where stock's is (sequence-parallel norms,
query/key norms, routers), and stock then sums those over the group.
"""

from __future__ import annotations

import torch

from tio_megatron.layers import grads


def to_main_grad(weight: torch.Tensor, partial: torch.Tensor) -> torch.Tensor | None:
    """Add ``partial`` to the fp32 buffer that DDP gave to ``weight``; without such a buffer, let autograd accumulate.

    The flag tells DDP's hook that the gradient is in the buffer already. It still wants a tensor (it asserts one when reduction overlaps
    with the backward pass, and adds it for a tied weight), so zeros are returned.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != torch.float32 or not hasattr(weight, "grad_added_to_main_grad"):
        return grads.to_autograd(weight, partial)
    main_grad.add_(partial.view_as(main_grad))
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)
