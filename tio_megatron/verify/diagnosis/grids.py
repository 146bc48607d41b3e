"""Narrow grids that values may have gone through and back: a cast, or a cast of what a scale was divided out of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_CASTS = ("float16", "float8_e4m3fn", "float8_e5m2")
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""The largest value of a type with scales: a scale takes the largest element that it is for to it."""
_WHOLE = 1 << 40
_SHARED = {"one scale": (_WHOLE, _WHOLE), "a scale for each row": (1, _WHOLE), "a scale for each block of 128": (128, 128)}
"""Rows and columns of a parameter that share a scale."""
_LEFT = 0.1
"""What a grid may leave of the difference: the result of a scale was rounded to the parameter's own type again."""

Values = np.ndarray[Any, Any]


def rounded(values: Values, narrow: str) -> Values:
    """``values`` (fp64) through a type and back."""
    if narrow == "int8":
        return np.round(values)
    found: Values = torch.from_numpy(values).to(torch.float32).to(getattr(torch, narrow)).to(torch.float64).numpy()
    return found


def grid_of(rough: Values, fine: Values, shape: tuple[int, ...]) -> str:
    """The grid through which ``fine`` becomes ``rough`` (fp64, of a parameter of this ``shape``), in words; "" where none of those known does."""
    gap = float(np.sqrt(np.mean((fine - rough) ** 2)))
    best = ("", _LEFT * gap)
    for narrow in _CASTS:
        error = float(np.sqrt(np.mean((rounded(fine, narrow) - rough) ** 2)))
        best = (narrow, error) if error < best[1] else best
    matrix = fine.reshape(shape[0] if len(shape) > 1 else 1, -1)
    for narrow, largest in _LARGEST.items():
        for words, size in _SHARED.items():
            scales = _largest(matrix, size) / largest
            for power, scale in (("", scales), ("power-of-two ", np.exp2(np.ceil(np.log2(scales))))):
                made = (rounded(matrix / scale, narrow) * scale).reshape(-1)
                error = float(np.sqrt(np.mean((made - rough) ** 2)))
                name = f"{narrow} with {words.replace('scale', power + 'scale')}"
                best = (name, error) if error < best[1] else best
    return best[0]


def _largest(matrix: Values, size: tuple[int, int]) -> Values:
    """[N, K]: the largest magnitude of the block that an element of ``matrix`` [N, K] belongs to; 1 where all are zero."""
    found = np.abs(matrix)
    for axis, length in enumerate(size):
        starts = np.arange(0, matrix.shape[axis], length)
        counts = np.diff([*starts, matrix.shape[axis]])
        found = np.repeat(np.maximum.reduceat(found, starts, axis=axis), counts, axis=axis)
    return np.where(found > 0, found, 1.0)
