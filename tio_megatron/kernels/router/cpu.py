"""Routing on the CPU (``csrc/router.cpp``), as operators of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads
from tio_megatron.kernels.operands import require

_scores = bind("tio_router_scores", pointer, size, size, pointer, integer)
_route = bind("tio_route", pointer, size, size, size, integer, pointer, pointer, integer)
_gradient = bind("tio_route_backward", pointer, pointer, pointer, size, size, size, integer, pointer, integer)
_sums = bind("tio_balance_sums", pointer, pointer, pointer, size, size, size, size, pointer, integer)
_balance = bind("tio_balance_backward", pointer, pointer, pointer, size, size, size, pointer, integer)


def _scores_cpu(logits: Tensor) -> Tensor:
    logits, p = logits.contiguous(), logits.new_empty(logits.shape)
    _scores(logits.data_ptr(), *logits.shape, p.data_ptr(), threads())
    return p


def _route_cpu(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    ids, probs = logits.new_empty(logits.shape[0], top_k, dtype=torch.int64), logits.new_empty(logits.shape[0], top_k)
    _route(logits.data_ptr(), *logits.shape, top_k, normalise, ids.data_ptr(), probs.data_ptr(), threads())
    return ids, probs


def _route_backward_cpu(dprobs: Tensor, logits: Tensor, ids: Tensor, normalise: bool) -> Tensor:
    dprobs, logits, ids = dprobs.contiguous(), logits.contiguous(), ids.contiguous()
    dlogits = logits.new_empty(logits.shape)
    found = _gradient(dprobs.data_ptr(), logits.data_ptr(), ids.data_ptr(), *logits.shape, ids.shape[1], normalise, dlogits.data_ptr(), threads())
    require(not found, "route_backward", f"ids reach outside the {logits.shape[1]} experts")
    return dlogits


def _sums_cpu(logits: Tensor, ids: Tensor, samples: Tensor, count: int) -> Tensor:
    logits, ids, samples = logits.contiguous(), ids.contiguous(), samples.contiguous()
    sums = ids.new_zeros(count, 2 * logits.shape[1] + 1)
    found = _sums(logits.data_ptr(), ids.data_ptr(), samples.data_ptr(), *logits.shape, ids.shape[1], count, sums.data_ptr(), threads())
    require(not found, "balance_sums", f"ids reach outside the {logits.shape[1]} experts, or samples outside the {count} samples")
    return sums


def _balance_backward_cpu(logits: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
    logits, weights, samples = logits.contiguous(), weights.contiguous(), samples.contiguous()
    dlogits = logits.new_empty(logits.shape)
    found = _balance(logits.data_ptr(), weights.data_ptr(), samples.data_ptr(), *logits.shape, len(weights), dlogits.data_ptr(), threads())
    require(not found, "balance_backward", f"samples reach outside the {len(weights)} samples")
    return dlogits


def _route_fake(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


scores = operator("router_scores(Tensor logits) -> Tensor", _scores_cpu, fake=lambda logits: logits.new_empty(logits.shape))
route = operator("route(Tensor logits, int top_k, bool normalise) -> (Tensor, Tensor)", _route_cpu, fake=_route_fake)
route_backward = operator(
    "route_backward(Tensor dprobs, Tensor logits, Tensor ids, bool normalise) -> Tensor",
    _route_backward_cpu,
    fake=lambda dprobs, logits, ids, normalise: logits.new_empty(logits.shape),
)
balance_sums = operator(
    "balance_sums(Tensor logits, Tensor ids, Tensor samples, int count) -> Tensor",
    _sums_cpu,
    fake=lambda logits, ids, samples, count: ids.new_empty(count, 2 * logits.shape[1] + 1),
)
balance_backward = operator(
    "balance_backward(Tensor logits, Tensor weights, Tensor samples) -> Tensor",
    _balance_backward_cpu,
    fake=lambda logits, weights, samples: logits.new_empty(logits.shape),
)


def _save(ctx, inputs: tuple[Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    logits, _, ctx.normalise = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[0])


def _backward(ctx, dids: Tensor, dprobs: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    return route_backward(dprobs, *ctx.saved_tensors, ctx.normalise), None, None


torch.library.register_autograd("tio::route", _backward, setup_context=_save)
