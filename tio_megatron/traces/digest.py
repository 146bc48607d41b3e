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

_NAN = 0x7FC00000
"""The NaN that stands for all."""

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
    width = flat.shape[1]
    keys = _keys(total or width, str(flat.device))
    words, shift = words_of(flat)
    if isinstance(columns, int):
        return _dot(words, keys[columns : columns + width], shift)
    found = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    columns = columns.to(flat.device)
    for start in columns.unique().tolist():  # a handful: the places of a token's experts
        here = columns == start
        found[here] = _dot(words[here], keys[start : start + width], shift)
    return found


def _dot(words: torch.Tensor, keys: torch.Tensor, shift: int) -> torch.Tensor:
    """Sum of ``keys * (words * 2^shift + SALT)``: the salt and the shift are taken out of the sum, which leaves one multiplication an element."""
    return (torch.mv(words, keys) << shift) + SALT * keys.sum()


def words_of(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(int64 numbers of the same shape, shift): the integers that stand for the values are these times ``2^shift``."""
    if not values.is_floating_point():
        return values.to(torch.int64), 0
    if values.dtype == torch.bfloat16:
        half = values.contiguous().view(torch.int16)
        if _has_nan(values):
            half = half.masked_fill(values.isnan(), _NAN >> 16)
        return half.to(torch.int64), 16
    wide = values.to(torch.float32).contiguous()
    words = wide.view(torch.int32)
    if _has_nan(wide):
        words = words.masked_fill(wide.isnan(), _NAN)
    return words.to(torch.int64), 0


def _has_nan(values: torch.Tensor) -> bool:
    """Quicker than ``isnan().any()``: the extremes of numbers with a NaN among them are NaN."""
    return values.numel() > 0 and bool(values.aminmax().min.isnan())


def tensor_digest(tensor: torch.Tensor) -> int:
    """One number for a whole tensor: the digest of its rows' digests, so it depends on the shape's first axis too."""
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    step = max(1, (1 << 22) // max(1, rows.shape[1]))
    found = torch.cat([row_digests(rows[start : start + step]) for start in range(0, len(rows), step)]) if len(rows) else rows.new_zeros(0, dtype=torch.int64)
    # Mixed before they are added up: a sum of sums would be the same for the transpose.
    mixed = _mixed(found.cpu().numpy().view(np.uint64)).view(np.int64)
    return int(row_digests(torch.from_numpy(mixed)[None])[0]) if len(found) else 0
