"""What one side says about some token sequences: the log-probability of every token, and a digest of every full row behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tio_megatron.files.whole import drafted
from tio_megatron.findings.messages import cut
from tio_megatron.verify.readers.arrays import DAMAGE

ROW_BYTES = 16


@dataclass(frozen=True)
class Recording:
    """Sequences end to end in flat arrays. Position ``i`` of the last three is the ``i``-th token that has a predecessor.

    ``lengths`` [B] tokens of each sequence, ``prompts`` [B] how many of them are prompt, ``tokens`` [sum of lengths] int32,
    ``logprobs`` [sum of (length - 1)] fp32, ``rows`` [sum of (length - 1), 16] uint8: the digest of the full vocabulary's
    log-probabilities that ``logprobs`` was taken from, or empty when a side cannot give it.
    """

    lengths: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rows: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        counts = {"lengths": self.lengths, "prompts": self.prompts}
        problems = [f"{name} must be whole numbers [B]" for name, array in counts.items() if array.ndim != 1 or array.dtype.kind not in "iu"]
        if problems:
            raise ValueError("recording: " + "; ".join(problems))
        scored = sum(self.lengths.tolist()) - len(self.lengths)
        if self.lengths.shape != self.prompts.shape or (self.prompts < 1).any() or (self.prompts > self.lengths).any():
            problems.append("every sequence needs a prompt of at least one token, no longer than itself")
        if self.tokens.shape != (scored + len(self.lengths),) or self.tokens.dtype != np.int32:
            problems.append(f"tokens must be int32 [{scored + len(self.lengths)}], got {self.tokens.dtype} {list(self.tokens.shape)}")
        if self.logprobs.shape != (scored,) or self.logprobs.dtype != np.float32:
            problems.append(f"logprobs must be float32 [{scored}], got {self.logprobs.dtype} {list(self.logprobs.shape)}")
        if self.rows.shape not in ((scored, ROW_BYTES), (0, ROW_BYTES)) or self.rows.dtype != np.uint8:
            problems.append(f"rows must be uint8 [{scored}, {ROW_BYTES}] or empty, got {self.rows.dtype} {list(self.rows.shape)}")
        if problems:
            raise ValueError("recording: " + "; ".join(problems))

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        prompts: Sequence[int],
        logprobs: Sequence[Sequence[float]],
        rows: Sequence[Sequence[bytes]] | None = None,
    ) -> Recording:
        """From one list per sequence; ``logprobs`` and ``rows`` start with a sequence's second token."""
        flat = [digest for sequence in rows or [] for digest in sequence]
        return cls(
            np.array([len(sequence) for sequence in tokens], dtype=np.int64),
            np.array(prompts, dtype=np.int64),
            np.array([token for sequence in tokens for token in sequence], dtype=np.int32),
            np.array([value for sequence in logprobs for value in sequence], dtype=np.float32),
            np.frombuffer(b"".join(flat), dtype=np.uint8).reshape(-1, ROW_BYTES),
        )

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens, one list per sequence."""
        return [part.tolist() for part in np.split(self.tokens, np.cumsum(self.lengths)[:-1])]

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Which scored tokens were sampled (the others belong to a prompt)."""
        parts = [np.arange(1, length) >= prompt for length, prompt in zip(self.lengths, self.prompts, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)

    def where(self, index: int) -> tuple[int, int]:
        """(sequence, position in it) of a scored token."""
        ends = np.cumsum(self.lengths - 1)
        sequence = int(np.searchsorted(ends, index, side="right"))
        return sequence, index - int(ends[sequence - 1] if sequence else 0) + 1

    def like(self, other: Recording) -> Recording:
        """What this recording says about ``other``'s sequences, in ``other``'s order.

        Raises:
            ValueError: it says nothing about one of them.
        """
        starts = np.concatenate([[0], np.cumsum(self.lengths - 1)])
        found = {tuple(sequence): i for i, sequence in enumerate(self.sequences)}
        try:
            chosen = [found[tuple(sequence)] for sequence in other.sequences]
        except KeyError as error:
            raise ValueError(f"recording: nothing was recorded about the sequence of {len(error.args[0])} tokens that starts {error.args[0][:8]}") from error
        places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen]) if chosen else np.zeros(0, dtype=np.int64)
        rows = self.rows[places] if len(self.rows) else self.rows
        return Recording(other.lengths, other.prompts, other.tokens, self.logprobs[places], rows)

    def __add__(self, other: Recording) -> Recording:
        """Both, one after the other."""
        names = ("lengths", "prompts", "tokens", "logprobs", "rows")
        return Recording(*[np.concatenate([getattr(self, name), getattr(other, name)]) for name in names])

    def save(self, path: Path) -> None:
        """Write an npz file; whoever reads ``path`` finds all of it or nothing.

        Raises:
            OSError: it cannot be written; names the file.
        """
        with drafted(path) as draft, draft.open("wb") as file:
            np.savez(file, lengths=self.lengths, prompts=self.prompts, tokens=self.tokens, logprobs=self.logprobs, rows=self.rows)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: no such file, or a damaged one.
        """
        names = ("lengths", "prompts", "tokens", "logprobs", "rows")
        try:
            with np.load(path, allow_pickle=False) as held:
                return cls(*(held[name] for name in names))
        except DAMAGE as error:
            raise ValueError(f"{path}: no recording, or a damaged one ({cut(str(error))})") from error
