"""Log-probabilities as loops hold them (lists, padded tensors with a mask), made into sequences of two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Side:
    """One sequence: ``tokens`` [n] int64 and both sides' ``trainer`` and ``rollout`` [n] fp32, unmasked tokens only."""

    tokens: npt.NDArray[np.int64]
    trainer: npt.NDArray[np.float32]
    rollout: npt.NDArray[np.float32]


def pair(tokens: Any, trainer: Any, rollout: Any, mask: Any = None) -> list[Side]:
    """The sequences of a batch.

    Args:
        tokens: token ids; [B, n] as a tensor or array, or B lists.
        trainer: log-probabilities of the same tokens, fp32.
        rollout: the same from the engine that sampled them.
        mask: 1 (or True) where a token counts; all of them by default.

    Raises:
        ValueError: shapes differ, or log-probabilities are not fp32.
    """
    rows = [_rows("tokens", tokens), _rows("trainer", trainer), _rows("rollout", rollout)]
    kept = [np.ones(len(row), dtype=bool) for row in rows[0]] if mask is None else [row.astype(bool) for row in _rows("mask", mask)]
    counts = {name: [len(row) for row in found] for name, found in zip(("tokens", "trainer", "rollout", "mask"), (*rows, kept), strict=True)}
    for name, count in counts.items():
        if count != counts["tokens"]:
            raise ValueError(f"monitor: {name} has sequences of {_few(count)} entries, tokens of {_few(counts['tokens'])}")
    return [
        Side(ids[keep].astype(np.int64), _fp32("trainer", left)[keep], _fp32("rollout", right)[keep])
        for ids, left, right, keep in zip(*rows, kept, strict=True)
    ]


def _rows(name: str, values: Any) -> list[npt.NDArray[Any]]:
    if hasattr(values, "detach"):  # a tensor, on any device; bf16 has no numpy type and is refused below by its name
        if str(values.dtype) == "torch.bfloat16":
            raise ValueError(f"monitor: {name} is torch.bfloat16; log-probabilities are compared in the float32 they were computed in")
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        if values.ndim != 2:
            raise ValueError(f"monitor: {name} has shape {list(values.shape)}; [sequences, tokens] is expected")
        return list(values)
    return [np.asarray(row.detach().cpu().numpy() if hasattr(row, "detach") else row) for row in values]


def _fp32(name: str, row: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Lists of Python numbers hold fp32 values exactly; another float type in a tensor would have been rounded."""
    narrow: npt.NDArray[np.float32] = row.astype(np.float32)
    if row.dtype == np.float64 and (narrow.astype(np.float64) != row)[np.isfinite(row)].any():
        raise ValueError(f"monitor: {name} holds numbers that are no float32; log-probabilities are compared in the float32 they were computed in")
    if row.dtype not in (np.float32, np.float64) and row.size:
        raise ValueError(f"monitor: {name} is {row.dtype}; log-probabilities are float32")
    return narrow


def _few(counts: Sequence[int]) -> str:
    return str(counts if len(counts) <= 6 else [*counts[:6], "..."])
