"""Combining expert rows, defined: the sum over the expert axis by the tree, of whichever nodes a rank owns.

``T`` tokens, ``k`` choices, ``R`` rows, ``H`` hidden, ``E`` experts, ``F`` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.contract import Node
from tio_megatron.contract.tree import ABSENT, next_power_of_two
from tio_megatron.kernels.exact import row_dot


def weighted(rows: Tensor, index: Tensor, probs: Tensor | None) -> Tensor:
    """fp32 ``[T, k, H]``: each choice's row times its probability, rounded once; choices that are not here are undefined."""
    value = rows.float()[index.clamp_min(0)] if rows.shape[0] else torch.zeros(*index.shape, rows.shape[1], dtype=torch.float32)
    return value if probs is None else value * probs.unsqueeze(-1)


def combine(rows: Tensor, index: Tensor, ids: Tensor, probs: Tensor | None, *, experts: int, nodes: Sequence[Node]) -> Tensor:
    """``[F, T, H]`` fp32, a node without a term -0."""
    tokens, top_k = index.shape
    width = next_power_of_two(experts)
    leaves = torch.full((width, tokens, rows.shape[1]), ABSENT, dtype=torch.float32)
    value = weighted(rows, index, probs)
    for j in range(top_k):
        here = (index[:, j] >= 0).nonzero().squeeze(1)
        leaves[ids[here, j], here] = value[here, j]
    out = torch.empty(len(nodes), tokens, rows.shape[1], dtype=torch.float32)
    for f, node in enumerate(nodes):
        part = leaves[node.start : node.stop]
        while part.shape[0] > 1:
            part = part[0::2] + part[1::2]
        out[f] = part[0]
    return out


def combine_backward(dout: Tensor, rows: Tensor, index: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``drows[R, H]`` = round(dout * prob), +0 for rows nobody chose; ``dprobs[T, k]`` = sum over H of dout * row, by the norm's rule."""
    tokens, top_k = index.shape
    d = dout.float()
    drows = torch.zeros_like(rows)
    dprobs = None if probs is None else torch.zeros(tokens, top_k, dtype=torch.float32)
    for j in range(top_k):
        here = (index[:, j] >= 0).nonzero().squeeze(1)
        if here.numel() == 0:
            continue
        at = index[here, j]
        drows[at] = (d[here] if probs is None else d[here] * probs[here, j, None]).to(rows.dtype)
        if dprobs is not None:
            dprobs[here, j] = row_dot(d[here], rows[at].float())
    return drows, dprobs
