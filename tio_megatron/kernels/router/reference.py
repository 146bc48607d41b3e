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
