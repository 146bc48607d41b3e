"""Which experts a token goes to, and with what probability.

Shapes: ``T`` tokens, ``k`` choices of a token, ``E`` experts, ``H`` hidden. Logits and probabilities are fp32 whatever the activations are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tio_megatron.kernels.linear import linear, matmul
from tio_megatron.kernels.router import route
from tio_megatron.layers import grads
from tio_megatron.layers.grains import MicroBatch
from tio_megatron.layers.permute import NOT_ROUTED


def router_logits(x: Tensor, weight: Tensor, *, batch: MicroBatch | None = None, slices: int = 1) -> Tensor:
    """``x @ weight.T`` in fp32, the axis H uncut.

    Args:
        x: [S, B, H] bf16 or fp32; under sequence parallelism this rank's slice of dimension 0.
        weight: [E, H] in the dtype of ``x``.
        batch: the grains of the weight's gradient; ``None`` sums all rows of this rank as one.
        slices: into how many slices sequence parallelism cuts dimension 0.

    Returns:
        [T, E] fp32, with ``T`` the product of the leading sizes.

    Raises:
        ValueError: the dtypes differ (a router kept in another dtype than the activations would be another product on each side).
    """
    if x.dtype != weight.dtype:
        raise ValueError(f"router: the weight is {weight.dtype} but the activations are {x.dtype}; keep both in one dtype")
    logits: Tensor = _Logits.apply(x, weight, batch, slices)
    return logits


def route_tokens(logits: Tensor, top_k: int, *, normalise: bool, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the ``top_k`` largest probabilities (ties to the lower id), optionally made to sum to one.

    Args:
        logits: [T, E] fp32.
        top_k: k.
        normalise: divide the chosen probabilities by their sum.
        padding: [T] bool, True for tokens that are padding. They are never routed.

    Returns:
        ``ids`` [T, k] int64, ascending in each token, and ``probs`` [T, k] fp32. A padding token has -1 and 0.

    Raises:
        ValueError: ``padding`` is not bool or not one a token; from the kernel, for logits or ``top_k`` that do not fit.
    """
    if padding is None:
        return route(logits, top_k, normalise)
    if padding.dtype != torch.bool or padding.shape != logits.shape[:1]:
        raise ValueError(f"router: padding is {padding.dtype} {list(padding.shape)}; expected torch.bool {list(logits.shape[:1])}, one a token")
    mask = padding.unsqueeze(1)
    # Filled first too: what a padding token holds must not come back as a gradient.
    ids, probs = route(logits.masked_fill(mask, 0.0), top_k, normalise)
    return ids.masked_fill(mask, NOT_ROUTED), probs.masked_fill(mask, 0.0)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, batch: MicroBatch | None, slices: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.batch, ctx.slices = batch, slices
        return linear(x.reshape(-1, x.shape[-1]), weight, leaves=1, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = matmul(dlogits, weight.t(), out_dtype=x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows, grains = x.reshape(-1, x.shape[-1]), grads.first_rows(len(dlogits))
            if ctx.batch is not None:
                grains, cut = ctx.batch.sliced(x.shape[0] * ctx.slices, len(rows) // max(x.shape[0], 1), ctx.slices)
                if cut:
                    gather = ctx.batch.gather_product if ctx.slices == 1 else ctx.batch.gather_sliced
                    rows, dlogits = gather(rows), gather(dlogits)
            dw = grads.products([weight], dlogits, rows, grains)[0]
        return dx, dw, None, None
