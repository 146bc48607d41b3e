"""Vocabulary embedding on an accelerator: rows are moved by torch's own indexing; their gradient adds a row's tokens in ascending order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 256


@triton.jit
def _backward(dout, order, starts, dw, h, BLOCK: tl.constexpr):
    """One row of the table: its tokens are ``order[starts[row] .. starts[row + 1]]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        token = tl.load(order + place)
        total = total + tl.load(dout + token * h + column, mask=column < h, other=0.0).to(tl.float32)
    tl.store(dw + row * h + column, total, mask=column < h)


def embedding(ids: Tensor, w: Tensor, first_row: int) -> Tensor:
    """``tio::embedding``: +0 for rows of other shards."""
    local = ids - first_row
    here = (local >= 0) & (local < w.shape[0])
    rows = w[torch.where(here, local, 0)] if w.shape[0] else w.new_zeros(*ids.shape, w.shape[1])
    return rows.masked_fill(~here.unsqueeze(-1), 0.0)


def embedding_backward(dout: Tensor, ids: Tensor, rows: int, first_row: int) -> Tensor:
    """``tio::embedding_backward``: ``[rows, H]`` fp32."""
    h = dout.shape[-1]
    local = ids.reshape(-1) - first_row
    sorted_ids, order = torch.sort(local, stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(rows + 1, dtype=local.dtype, device=local.device))
    dw = dout.new_empty(rows, h, dtype=torch.float32)
    if dw.numel():
        _backward[(rows, triton.cdiv(h, BLOCK))](dout.reshape(-1, h).contiguous(), order, starts, dw, h, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return dw


KERNELS = {"embedding": embedding, "embedding_backward": embedding_backward}
