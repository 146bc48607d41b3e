"""Where the gradient of a weight goes. Every layer hands over what the sum over tokens is made of, so the rule of that sum lives in one place.

An autograd function may only return a gradient in the weight's own dtype, which would round an fp32 partial before it is added up. An
engine that keeps sums of its own therefore sets a *sink* that takes the operands as they are.

Legend: ``R`` rows (tokens), ``N`` outputs, ``K`` inputs, ``E`` weights, ``H`` the normalised axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tio_megatron.kernels import embedding as embedding_kernel
from tio_megatron.kernels import linear as linear_kernel
from tio_megatron.layers.grains import Grains


class Sink(Protocol):
    """Takes gradients. Each method returns what ``backward`` returns for the weight: a gradient in its dtype, or ``None`` if it went elsewhere."""

    def products(self, weights: Sequence[Tensor], dy: Tensor, x: Tensor, grains: Grains) -> list[Tensor | None]:
        """For each weight ``[N, K]`` the sum over its rows of ``dy[r]`` ``[N]`` times ``x[r]`` ``[K]``; fp32 inside a grain."""

    def rows(self, weight: Tensor, dy: Tensor, ids: Tensor) -> Tensor | None:
        """For a table ``[V, H]`` the sum of ``dy`` ``[R, H]`` at rows ``ids`` ``[R]``."""

    def norm(self, weight: Tensor, dy: Tensor, x: Tensor, eps: float, total: Tensor) -> Tensor | None:
        """For a norm's weight ``[H]`` the sum over all rows of ``dy`` times the normalised ``x`` (both ``[R, H]``); ``total`` is that sum in fp32."""


class ToAutograd:
    """The plain rule: the fp32 sum over the rows that this rank has seen, rounded to the weight's dtype; autograd accumulates."""

    def products(self, weights: Sequence[Tensor], dy: Tensor, x: Tensor, grains: Grains) -> list[Tensor | None]:
        """Rows of one weight lie together; one weight at a time, so that only its gradient is held in fp32."""
        if len(weights) == 1 and grains.order is None:
            # No number to look up: a graph compiler need not stop here.
            return [linear_kernel.matmul(dy.t(), x.t()).to(weights[0].dtype)]
        edges = grains.starts[grains.of].tolist()
        if grains.order is not None:
            order = grains.order.to(dy.device)
            dy, x = dy.index_select(0, order), x.index_select(0, order)
        return [linear_kernel.matmul(dy[lo:hi].t(), x[lo:hi].t()).to(w.dtype) for lo, hi, w in zip(edges[:-1], edges[1:], weights, strict=True)]

    def rows(self, weight: Tensor, dy: Tensor, ids: Tensor) -> Tensor | None:
        """By the embedding operator."""
        return embedding_kernel.embedding_backward(dy, ids, weight.shape[0], 0).to(weight.dtype)

    def norm(self, weight: Tensor, dy: Tensor, x: Tensor, eps: float, total: Tensor) -> Tensor | None:
        """``total``, rounded."""
        return total.to(weight.dtype)


_sink: Sink = ToAutograd()


def use(sink: Sink) -> Sink:
    """Send gradients to ``sink`` from now on; returns the sink used until now."""
    global _sink
    before, _sink = _sink, sink
    return before


def products(weights: Sequence[Tensor], dy: Tensor, x: Tensor, grains: Grains) -> list[Tensor | None]:
    """What ``backward`` returns for each of ``weights`` ``[N, K]``, once their gradients have gone where they belong.

    Call this only when they need gradients.

    Args:
        weights: alike, any dtype.
        dy: ``[R, N]``, bf16 or fp32.
        x: ``[R, K]``, bf16 or fp32.
        grains: the rows of each weight.

    Raises:
        ValueError: operands that do not fit the weights.
    """
    for weight in weights:
        if dy.dim() != 2 or x.dim() != 2 or weight.shape != (dy.shape[1], x.shape[1]) or len(dy) != len(x):
            raise ValueError(f"gradient of a weight {tuple(weight.shape)}: operands {tuple(dy.shape)} and {tuple(x.shape)} do not fit")
    if grains.of.numel() != len(weights) + 1:
        raise ValueError(f"gradients of {len(weights)} weights: the grains are of {grains.of.numel() - 1}")
    return _sink.products(weights, dy, x, grains)


def rows(weight: Tensor, dy: Tensor, ids: Tensor) -> Tensor | None:
    """The same for a table: ``dy`` ``[R, H]`` is added at the rows ``ids`` ``[R]`` of ``weight`` ``[V, H]``."""
    return _sink.rows(weight, dy, ids)


def norm(weight: Tensor, dy: Tensor, x: Tensor, eps: float, total: Tensor) -> Tensor | None:
    """The same for a norm's weight ``[H]``, from ``dy`` and ``x`` ``[R, H]`` and the fp32 ``total`` that the norm's backward gives."""
    return _sink.norm(weight, dy, x, eps, total)


def first_rows(count: int) -> Grains:
    """All ``count`` rows as one grain of one weight."""
    return Grains.whole(torch.tensor([0, count]))
