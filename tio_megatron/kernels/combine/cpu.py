"""Combining expert rows on the CPU, as the operators ``tio::combine`` and ``tio::combine_backward``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.contract import Node
from tio_megatron.kernels.combine import reference
from tio_megatron.kernels.library import operator


def _combine_cpu(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, experts: int, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    nodes = [Node(start, size) for start, size in zip(starts, sizes, strict=True)]
    return reference.combine(rows, index, ids, probs, experts=experts, nodes=nodes)


def _backward_cpu(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    drows, dprobs = reference.combine_backward(dout, rows, index, probs)
    return drows, torch.empty(0) if dprobs is None else dprobs


def _backward_fake(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(0 if probs is None else index.shape, dtype=torch.float32)


combine = operator(
    "combine(Tensor rows, Tensor index, Tensor ids, Tensor? probs, int experts, int[] starts, int[] sizes) -> Tensor",
    _combine_cpu,
    fake=lambda rows, index, ids, probs, experts, starts, sizes: rows.new_empty(len(starts), index.shape[0], rows.shape[1], dtype=torch.float32),
)
combine_backward = operator("combine_backward(Tensor dout, Tensor rows, Tensor index, Tensor? probs) -> (Tensor, Tensor)", _backward_cpu, fake=_backward_fake)
