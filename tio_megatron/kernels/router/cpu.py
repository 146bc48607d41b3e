"""Routing on the CPU, as the operators ``tio::router_scores``, ``tio::route`` and ``tio::route_backward``."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.library import operator
from tio_megatron.kernels.router import reference


def _route_fake(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


scores = operator("router_scores(Tensor logits) -> Tensor", reference.scores, fake=lambda logits: logits.new_empty(logits.shape))
route = operator("route(Tensor logits, int top_k, bool normalise) -> (Tensor, Tensor)", reference.route, fake=_route_fake)
route_backward = operator(
    "route_backward(Tensor dprobs, Tensor logits, Tensor ids, bool normalise) -> Tensor",
    reference.route_backward,
    fake=lambda dprobs, logits, ids, normalise: logits.new_empty(logits.shape),
)


def _save(ctx, inputs: tuple[Tensor, int, bool], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    logits, _, ctx.normalise = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[0])


def _backward(ctx, dids: Tensor, dprobs: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    return route_backward(dprobs, *ctx.saved_tensors, ctx.normalise), None, None


torch.library.register_autograd("tio::route", _backward, setup_context=_save)
