"""Where the gradient of a weight goes. Every layer hands its fp32 partial sum to :func:`deliver`, so the rule lives in one place.

An autograd function may only return a gradient in the weight's own dtype, which would round an fp32 partial before it is added up. An
engine that keeps fp32 gradient buffers therefore sets a *sink* that takes the partial as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Sink = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | None"]


def to_autograd(weight: torch.Tensor, partial: torch.Tensor) -> torch.Tensor | None:
    """The plain rule: round to the weight's dtype and let autograd accumulate."""
    return partial.to(weight.dtype)


_sink: Sink = to_autograd


def use(sink: Sink) -> Sink:
    """Send gradients to ``sink`` from now on; returns the sink used until now."""
    global _sink
    before, _sink = _sink, sink
    return before


def deliver(weight: torch.Tensor, partial: torch.Tensor) -> torch.Tensor | None:
    """What ``backward`` returns for ``weight``, once the gradient has gone where it belongs.

    Args:
        weight: the parameter, any dtype. Call this only when it needs a gradient.
        partial: fp32, the shape of ``weight``: the sum over the tokens this rank has seen.

    Raises:
        ValueError: not fp32, or another shape.
    """
    if partial.dtype != torch.float32 or partial.shape != weight.shape:
        raise ValueError(f"gradient of a weight {tuple(weight.shape)}: expected fp32 of that shape, got {partial.dtype} {tuple(partial.shape)}")
    return _sink(weight, partial)
