"""Vocabulary embedding: one owner per row, rows moved and never summed. Joining the ranks' rows is not here.

``V_local`` rows of this rank's shard, ``H`` hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.embedding import cpu
from tio_megatron.kernels.linear import PackedWeight
from tio_megatron.kernels.operands import check_activations, check_dtype, check_shape

__all__ = ["embedding", "embedding_backward"]


def embedding(ids: Tensor, w: Tensor | PackedWeight, first_row: int = 0) -> Tensor:
    """Row ``id - first_row`` of ``w[V_local, H]`` for each of ``ids[...]`` int64; +0 where the row is not in this shard. Differentiable in a tensor.

    The bytes are moved as they are: -0 stays -0, NaN stays NaN. A packed weight is slower to read (:meth:`.linear.PackedWeight.rows`).

    Raises:
        ValueError: shapes, types or device do not fit.
    """
    check_dtype("embedding", "ids", ids, torch.int64)
    if isinstance(w, PackedWeight):
        local = ids - first_row
        here = (local >= 0) & (local < w.shape[0])
        return w.rows(torch.where(here, local, 0)).masked_fill_(~here.unsqueeze(-1), 0.0)
    check_activations("embedding", {"w": w})
    check_shape("embedding", "w", w, -1, -1)
    return cpu.embedding(ids, w, first_row)


def embedding_backward(dout: Tensor, ids: Tensor, rows: int, first_row: int = 0) -> Tensor:
    """``dw[rows, H]`` fp32: from +0, the gradients of a row's tokens added in ascending token order.

    Raises:
        ValueError: shapes, types or device do not fit.
    """
    check_activations("embedding_backward", {"dout": dout})
    check_dtype("embedding_backward", "ids", ids, torch.int64)
    check_shape("embedding_backward", "dout", dout, *ids.shape, -1)
    return cpu.embedding_backward(dout, ids, rows, first_row)
