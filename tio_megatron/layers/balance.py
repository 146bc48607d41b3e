"""The sequence-wise balance loss of a router: each sample on its own, whatever rows of it this rank holds.

For a sample of ``T`` tokens of which ``n_e`` chose expert ``e``, with the probabilities ``p`` of the softmax over all ``E`` experts::

    L = c * E / (k * T^2) * sum over e of n_e * (sum over its tokens of p_e)

(Switch Transformer, arXiv 2101.03961, equations 4 to 6, taken per sequence and for k choices as in DeepSeek-V3, arXiv 2412.19437, equations
17 to 20). What is added to the sum of the token losses is ``T * L``, so that a division by the tokens of the global batch makes it the mean
of ``L`` weighted by tokens. The counts have no gradient, so the gradient of ``p_e`` is ``c * E * n_e / (k * T)`` for every token of the sample.

Legend: ``R`` rows here, ``E`` experts, ``k`` choices, ``S`` samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tio_megatron import collectives
from tio_megatron.kernels.router import MOST_TOKENS, balance_backward, balance_sums, balance_value, balance_weights
from tio_megatron.layers.grains import MicroBatch, rank

NOT_COUNTED = -1
"""The sample of a padding token."""


def one() -> float:
    """The scale of a loss that is not scaled."""
    return 1.0


def add_balance_loss(
    probs: Tensor,
    logits: Tensor,
    ids: Tensor,
    *,
    batch: MicroBatch,
    length: int,
    samples: int,
    slices: int,
    padding: Tensor | None,
    coefficient: float,
    scale: Callable[[], float] = one,
) -> tuple[Tensor, Tensor]:
    """Make the backward pass of ``probs`` add the gradient of the balance loss to that of ``logits``.

    The gradient does not depend on that of ``probs``: it is ``p (w - sum of w p)`` with the sum in the router's order, and one addition joins
    it to the gradient that comes through the chosen probabilities.

    Args:
        probs: ``[R, k]`` fp32.
        logits: ``[R, E]`` fp32.
        ids: ``[R, k]`` int64.
        batch: which samples the rows belong to.
        length: positions of the micro-batch on this context-parallel rank, slices of sequence parallelism joined.
        samples: its second axis.
        slices: of sequence parallelism.
        padding: ``[R]`` bool, True where a token does not count; needed where the micro-batch says that it holds padding.
        coefficient: ``c``.
        scale: of the main loss, asked for in the backward pass.

    Returns:
        ``probs``, and the loss of each sample for a coefficient of 1, ``[S]`` fp32, the same on all ranks that hold parts of them. A sample
        without tokens has 0.

    Raises:
        ValueError: padding that no mask tells, or samples of more than 4194304 tokens.
    """
    if padding is None and batch.has_padding(length):
        raise ValueError("the auxiliary loss counts tokens, and these packed samples hold padding: pass padding_mask [b, s], True for padding")
    if length * batch.sequences.ranks > MOST_TOKENS:
        raise ValueError(f"the auxiliary loss: {length * batch.sequences.ranks} positions, more than {MOST_TOKENS}")
    of = batch.samples(length, samples, slices, 0 if slices == 1 else rank(batch.tensor)).to(logits.device)
    if padding is not None:
        of = of.masked_fill(padding, NOT_COUNTED)
    with torch.no_grad():
        mine = balance_sums(logits.detach(), ids, of, batch.sequences.count(length, samples))
        sums = collectives.all_gather(mine.unsqueeze(0), batch.context if slices == 1 else batch.block).sum(0)
        weights, values = balance_weights(sums, coefficient), balance_value(sums, ids.shape[1])
    joined: Tensor = _Joined.apply(probs, logits, weights, of, scale)
    return joined, values


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, logits: Tensor, weights: Tensor, of: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.save_for_backward(logits, weights, of)
        ctx.scale = scale
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        logits, weights, of = ctx.saved_tensors
        scale = ctx.scale()
        return dprobs, balance_backward(logits, weights if scale == 1.0 else weights * scale, of), None, None, None
