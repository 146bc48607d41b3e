"""Routing, defined: softmax over all experts in fp32, top-k of the probabilities, ties to the lower id, ids ascending."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.exact import ROUTER_CHAIN, chain_sum, chained_sum
from tio_megatron.kernels.math import reference as m


def scores(logits: Tensor) -> Tensor:
    """Softmax of ``logits[T, E]`` fp32: exp(l - max) over their sum (chains of 8 experts joined by the tree), one division each.

    NaN logits do not count as the maximum; through the sum they make the whole row NaN.
    """
    top = torch.where(logits.isnan(), float("-inf"), logits).amax(-1, keepdim=True)
    p = m.exp(logits - top)
    return p / chained_sum(p, ROUTER_CHAIN).unsqueeze(-1)


def route(logits: Tensor, top_k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """``ids[T, k]`` int64 ascending and ``probs[T, k]`` fp32. A row of NaN takes the ids 0 .. k-1 with NaN probabilities."""
    p = scores(logits)
    order = torch.sort(torch.where(p.isnan(), 0.0, p), dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].sort(-1).values
    chosen = p.gather(1, ids)
    return ids, chosen / chain_sum(chosen).unsqueeze(-1) if normalise else chosen


def route_backward(dprobs: Tensor, logits: Tensor, ids: Tensor, normalise: bool = True) -> Tensor:
    """``dlogits[T, E]`` fp32 for the gradient of the chosen probabilities.

    Normalised: q_i (dq_i - sum dq q) for the chosen, +0 for the others. Not normalised: p_e (dp_e - sum dp p), dp_e 0 for the
    others. Sums by ascending expert, products rounded.
    """
    p = scores(logits)
    chosen = p.gather(1, ids)
    if normalise:
        chosen = chosen / chain_sum(chosen).unsqueeze(-1)
    mean = chain_sum(dprobs * chosen).unsqueeze(-1)
    if normalise:
        return torch.zeros_like(logits).scatter(1, ids, chosen * (dprobs - mean))
    return p * (torch.zeros_like(logits).scatter(1, ids, dprobs) - mean)


def balance_sums(logits: Tensor, ids: Tensor, samples: Tensor, count: int) -> Tensor:
    """``[count, 2 E + 1]`` int64: see :func:`tio_megatron.kernels.router.balance_sums`."""
    experts = logits.shape[1]
    sums = torch.zeros(count, 2 * experts + 1, dtype=torch.int64)
    for sample, chosen, p in zip(samples.tolist(), ids.tolist(), scores(logits), strict=True):
        if sample < 0:
            continue
        for expert in chosen:
            sums[sample, expert] += 1
        if p.isnan().any():
            sums[sample, -1] += 1
        else:
            sums[sample, experts:-1] += (p.double() * 2.0**40).round().to(torch.int64)
    return sums


def balance_backward(logits: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
    """``p_e (w_e - sum w p)`` with the softmax ``p`` and the weights of the token's sample; +0 for tokens of sample -1."""
    p, w = scores(logits), weights[samples.clamp(min=0)]
    mean = chained_sum(w * p, ROUTER_CHAIN).unsqueeze(-1)
    return torch.where((samples >= 0).unsqueeze(-1), p * (w - mean), 0.0)
