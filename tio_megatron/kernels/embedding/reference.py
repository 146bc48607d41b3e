"""Vocabulary embedding, defined: rows are moved, never summed; the gradient adds tokens in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, w: Tensor, first_row: int = 0) -> Tensor:
    """``ids[...]``, ``w[V_local, H]`` -> ``[..., H]``: row ``id - first_row``, or +0 where another rank owns it."""
    local = ids - first_row
    here = (local >= 0) & (local < w.shape[0])
    rows = w[torch.where(here, local, 0)] if w.shape[0] else w.new_zeros(*ids.shape, w.shape[1])
    return torch.where(here.unsqueeze(-1), rows, torch.zeros((), dtype=w.dtype))


def embedding_backward(dout: Tensor, ids: Tensor, rows: int, first_row: int = 0) -> Tensor:
    """``dw[rows, H]`` fp32: from +0, the tokens' gradients added one after another."""
    dw = torch.zeros(rows, dout.shape[-1], dtype=torch.float32)
    for token, d in zip((ids.reshape(-1) - first_row).tolist(), dout.reshape(-1, dout.shape[-1]).float(), strict=True):
        if 0 <= token < rows:
            dw[token] += d
    return dw
