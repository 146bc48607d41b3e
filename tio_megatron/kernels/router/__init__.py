"""Which experts a token goes to, and with what probability. Moving the tokens is not here.

``T`` tokens, ``E`` experts, ``k`` choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.operands import check_dtype, check_shape, require
from tio_megatron.kernels.router import cpu

__all__ = ["route", "route_backward", "scores"]


def _check(what: str, logits: Tensor) -> None:
    check_dtype(what, "logits", logits, torch.float32)
    check_shape(what, "logits", logits, -1, -1)
    require(logits.shape[1] >= 1, what, "there must be at least one expert")


def scores(logits: Tensor) -> Tensor:
    """Softmax over all experts of ``logits[T, E]`` fp32, the sum in chains of 8 experts joined by the tree. A NaN logit makes its own row NaN. No autograd.

    Raises:
        ValueError: not an fp32 matrix on the CPU.
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
        ValueError: not an fp32 matrix on the CPU, or ``top_k`` outside 1 .. E.
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
