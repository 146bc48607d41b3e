"""Digests of rows that shards can add up: a linear hash modulo 2^64, so no rank ever needs the whole row.

``digest(row) = sum over columns j of key[j] * (word[j] + SALT) mod 2^64``. ``word`` is the element's fp32 bits (any NaN counts as one NaN; bf16 and fp16
become fp32 exactly, so a value has one digest whatever type carries it) or its integer value; ``key[j]`` is an odd 64-bit number made from the
*global* column ``j``. A rank with columns ``[a, b)`` computes its part of the sum, and parts are added as integers: tensor-parallel slices, experts on
other ranks, and tokens on other ranks give the digest of the unsharded row, in any order and without moving a tensor.

It finds accidents, not forgeries.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

SALT = 0x5851F42D
"""Added to every word, so that a row of zeros differs from an absent one."""


@lru_cache(maxsize=64)
def _keys(width: int, device: str) -> torch.Tensor:
    state = _mixed(np.arange(1, width + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).to(device)


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number replaced by one that looks random (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        state = state * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def row_digests(rows: torch.Tensor, columns: int | torch.Tensor = 0, total: int | None = None) -> torch.Tensor:
    """[n] int64 digests of ``rows`` [n, ...], each flattened.

    Args:
        rows: floating point, integer or boolean.
        columns: global column of the first element, one for all rows or one each ([n] int64).
        total: columns of the whole row; those of ``rows`` if None.
    """
    flat = rows.detach().reshape(len(rows), -1) if rows.dim() > 1 else rows.detach().reshape(-1, 1)
    words = words_of(flat)
    width = flat.shape[1]
    keys = _keys(total or width, str(flat.device))
    if isinstance(columns, int):
        chosen = keys[columns : columns + width]
    else:
        chosen = keys[columns.to(flat.device)[:, None] + torch.arange(width, device=flat.device)]
    return ((words + SALT) * chosen).sum(dim=1)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """The integers that stand for the values: int64, of the same shape."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    wide = values.to(torch.float32)
    nan = wide.isnan()
    if nan.any():
        wide = wide.masked_fill(nan, float("nan"))
    return wide.contiguous().view(torch.int32).to(torch.int64)


def tensor_digest(tensor: torch.Tensor) -> int:
    """One number for a whole tensor: the digest of its rows' digests, so it depends on the shape's first axis too."""
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    step = max(1, (1 << 22) // max(1, rows.shape[1]))
    found = torch.cat([row_digests(rows[start : start + step]) for start in range(0, len(rows), step)]) if len(rows) else rows.new_zeros(0, dtype=torch.int64)
    # Mixed before they are added up: a sum of sums would be the same for the transpose.
    mixed = _mixed(found.cpu().numpy().view(np.uint64)).view(np.int64)
    return int(row_digests(torch.from_numpy(mixed)[None])[0]) if len(found) else 0
