"""Which experts a token goes to, and with what probability; how evenly a sample's tokens are spread. Moving the tokens is not here.

``T`` tokens, ``E`` experts, ``k`` choices, ``S`` samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.math import tree_add
from tio_megatron.kernels.operands import check_dtype, check_shape, require
from tio_megatron.kernels.router import cpu

__all__ = ["MOST_TOKENS", "balance_backward", "balance_sums", "balance_value", "balance_weights", "route", "route_backward", "scores"]

MOST_TOKENS = 2**22
"""Of one sample: its sums of probabilities, in units of ``2**-40``, then fit in 64 bits."""


def _check(what: str, logits: Tensor) -> None:
    check_dtype(what, "logits", logits, torch.float32)
    check_shape(what, "logits", logits, -1, -1)
    require(logits.shape[1] >= 1, what, "there must be at least one expert")


def scores(logits: Tensor) -> Tensor:
    """Softmax over all experts of ``logits[T, E]`` fp32, the sum in chains of 8 experts joined by the tree. A NaN logit makes its own row NaN. No autograd.

    Raises:
        ValueError: not an fp32 matrix, or a device without kernels.
    """
    _check("router_scores", logits)
    return cpu.scores(logits)


def route(logits: Tensor, top_k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest of softmax(logits), ties to the lower expert id. The probabilities are differentiable.

    Args:
        logits: ``[T, E]`` fp32.
        top_k: choices, at most E.
        normalise: divide the chosen probabilities by their sum, taken by ascending expert id.

    Returns:
        ``ids[T, k]`` int64 by ascending expert id (not by probability), and their ``probs[T, k]`` fp32. A row with a NaN logit is
        defined: ids 0 .. k-1 with NaN probabilities, so that the NaN stays with its own token.

    Raises:
        ValueError: not an fp32 matrix, or a device without kernels, or ``top_k`` outside 1 .. E.
    """
    _check("route", logits)
    require(1 <= top_k <= logits.shape[1], "route", f"top_k {top_k} of {logits.shape[1]} experts; it must be between 1 and {logits.shape[1]}")
    return cpu.route(logits, top_k, normalise)


def route_backward(dprobs: Tensor, logits: Tensor, ids: Tensor, normalise: bool = True) -> Tensor:
    """``dlogits[T, E]`` fp32 from ``dprobs[T, k]``; the probabilities are computed again from the logits.

    Raises:
        ValueError: shapes or types do not fit.
    """
    _check("route_backward", logits)
    check_dtype("route_backward", "dprobs", dprobs, torch.float32)
    check_dtype("route_backward", "ids", ids, torch.int64)
    check_shape("route_backward", "ids", ids, logits.shape[0], -1)
    check_shape("route_backward", "dprobs", dprobs, *ids.shape)
    require(ids.shape[1] <= logits.shape[1], "route_backward", f"{ids.shape[1]} choices of {logits.shape[1]} experts")
    return cpu.route_backward(dprobs, logits, ids, normalise)


def balance_sums(logits: Tensor, ids: Tensor, samples: Tensor, count: int) -> Tensor:
    """What the sequence-wise balance loss is made of, as integers: to be added over calls and ranks in any order.

    Args:
        logits: ``[T, E]`` fp32.
        ids: ``[T, k]`` int64, the chosen experts.
        samples: ``[T]`` int64 below ``count``; -1 for a token that does not count (padding), whose ids are not read.
        count: S.

    Returns:
        ``[S, 2 E + 1]`` int64: for each expert how often it was chosen; for each expert the sum of the probabilities (softmax over all
        experts), each rounded half to even to a multiple of ``2**-40``, in that unit; how many tokens have NaN probabilities, which count 0.

    Raises:
        ValueError: shapes or types do not fit, ids or samples reach outside, or more than :data:`MOST_TOKENS` tokens.
    """
    _check("balance_sums", logits)
    for name, index in (("ids", ids), ("samples", samples)):
        check_dtype("balance_sums", name, index, torch.int64)
    check_shape("balance_sums", "ids", ids, logits.shape[0], -1)
    check_shape("balance_sums", "samples", samples, logits.shape[0])
    require(logits.shape[0] <= MOST_TOKENS, "balance_sums", f"{logits.shape[0]} tokens, more than {MOST_TOKENS}")
    return cpu.balance_sums(logits, ids, samples, count)


def balance_weights(sums: Tensor, coefficient: float) -> Tensor:
    """``coefficient E n / (k T)`` for each sample and expert, ``[S, E]`` fp32: the gradient of the probability of each of its tokens.

    ``n`` tokens of the sample chose the expert, and it has ``T`` in all. In float64 from left to right, then one rounding to fp32; by way of the host,
    since an NPU has no float64.

    Args:
        sums: of :func:`balance_sums`, of the whole sample.
    """
    chosen = sums[:, : sums.shape[1] // 2].cpu()
    return (coefficient * chosen.shape[1] * chosen.double() / chosen.sum(1, keepdim=True).clamp(min=1).double()).float().to(sums.device)


def balance_value(sums: Tensor, top_k: int) -> Tensor:
    """The loss of each sample for a coefficient of 1, ``[S]`` fp32: ``E / (k T^2)`` times the sum over experts of ``n P``.

    ``P`` is the sum of the expert's probabilities. ``n`` and ``P`` are rounded to fp32, so is their product; products are added by
    ``ReductionTree(E)``; the rest is float64 with one rounding. A sample without tokens has 0, one with NaN has NaN. By way of the host, as the weights.
    """
    device, sums = sums.device, sums.cpu()
    experts = sums.shape[1] // 2
    chosen, total = sums[:, :experts], sums[:, experts:-1].double() * 2.0**-40
    tokens = (chosen.sum(1) // top_k).clamp(min=1).double()
    value = tree_add((chosen.float() * total.float()).t().contiguous()).double() * experts / (top_k * tokens * tokens)
    return torch.where(sums[:, -1] > 0, float("nan"), value).float().to(device)


def balance_backward(logits: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
    """``dlogits[T, E]`` fp32 of the sum over all tokens and experts of ``weights[samples[t], e]`` times the probability.

    Args:
        logits: ``[T, E]`` fp32.
        weights: ``[S, E]`` fp32.
        samples: ``[T]`` int64 below S; -1 gives +0.

    Raises:
        ValueError: shapes or types do not fit, or samples reach outside.
    """
    _check("balance_backward", logits)
    check_dtype("balance_backward", "weights", weights, torch.float32)
    check_shape("balance_backward", "weights", weights, -1, logits.shape[1])
    check_dtype("balance_backward", "samples", samples, torch.int64)
    check_shape("balance_backward", "samples", samples, logits.shape[0])
    return cpu.balance_backward(logits, weights, samples)
