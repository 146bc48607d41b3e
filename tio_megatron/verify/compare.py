"""Two recordings of the same tokens: how many log-probabilities differ in their bytes, by how much, and where first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tio_megatron.verify.recording import Recording


@dataclass(frozen=True)
class Comparison:
    """The outcome. ``tokens`` compared, ``sampled`` of them sampled, ``nonzero`` with different bytes, ``max_abs`` the largest
    |difference| (infinite where only one side is a number), ``rows`` full-vocabulary rows compared, ``rows_differing`` of them with
    another digest, ``nonfinite`` tokens whose log-probability is no finite number on either side, ``first`` the first difference (or, if
    there is none, the first such token) in words; ``differences`` [tokens] fp64.
    """

    tokens: int
    sampled: int
    nonzero: int
    max_abs: float
    rows: int
    rows_differing: int
    first: str = ""
    differences: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)
    nonfinite: int = 0

    @property
    def same(self) -> bool:
        """Whether every byte agreed, and what was compared were numbers: two broken models agree on nothing but NaN."""
        return self.tokens > 0 and self.nonzero == 0 and self.rows_differing == 0 and self.nonfinite == 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.tokens + other.tokens,
            self.sampled + other.sampled,
            self.nonzero + other.nonzero,
            max(self.max_abs, other.max_abs),
            self.rows + other.rows,
            self.rows_differing + other.rows_differing,
            self.first or other.first,
            np.concatenate([self.differences, other.differences]),
            self.nonfinite + other.nonfinite,
        )


def compare(trainer: Recording, rollout: Recording) -> Comparison:
    """Compare the bytes of two recordings. Rows of the full vocabulary are compared where both sides have them.

    Raises:
        ValueError: they are about different tokens, or one side has rows for other tokens than the other.
    """
    for name in ("lengths", "tokens"):
        ours, theirs = getattr(trainer, name), getattr(rollout, name)
        if ours.shape != theirs.shape or (ours != theirs).any():
            raise ValueError(f"compare: the recordings are about different tokens ({name} differ)")
    a, b = trainer.logprobs, rollout.logprobs
    differing = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        differences = np.where(differing, a.astype(np.float64) - b.astype(np.float64), 0.0)
    differences[np.isnan(differences)] = np.inf
    if len(trainer.rows) != len(rollout.rows):
        raise ValueError(f"compare: {len(trainer.rows)} full-vocabulary rows on one side, {len(rollout.rows)} on the other; record them on both or on neither")
    rows = (trainer.rows != rollout.rows).any(axis=1)
    nonfinite = ~np.isfinite(a) | ~np.isfinite(b)
    first = ""
    if differing.any() or rows.any():
        index = int(np.argmax(differing if differing.any() else rows))
        sequence, position = rollout.where(index)
        what = f"{a[index]} / {b[index]} (bytes {a[index].tobytes()[::-1].hex()} / {b[index].tobytes()[::-1].hex()})" if differing.any() else "another row"
        first = f"sequence {sequence}, token {position}: {what}"
    elif nonfinite.any():
        index = int(np.argmax(nonfinite))
        sequence, position = rollout.where(index)
        first = f"sequence {sequence}, token {position}: {a[index]} on both sides is no log-probability ({int(nonfinite.sum())} such tokens)"
    return Comparison(
        tokens=len(a),
        sampled=int(rollout.sampled.sum()),
        nonzero=int(differing.sum()),
        max_abs=float(np.abs(differences).max(initial=0.0)),
        rows=len(rows),
        rows_differing=int(rows.sum()),
        first=first,
        differences=differences,
        nonfinite=int(nonfinite.sum()),
    )
