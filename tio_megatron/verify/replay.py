"""Scores what a store holds again and compares the bytes: the log-probabilities must be those that were stored, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tio_megatron.checkpoint import Checkpoint, manifest_digest
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import read
from tio_megatron.kernels import version
from tio_megatron.rollouts import Batch, StoreError
from tio_megatron.verify.matrix.run import record
from tio_megatron.verify.matrix.table import Side, Table
from tio_megatron.verify.readers import read_scored

Score = Callable[[Batch], Sequence[npt.NDArray[np.float32] | Sequence[float]]]
"""From a batch to the log-probabilities of the response tokens of each of its sequences, at the batch's temperature."""


@dataclass(frozen=True)
class Replayed:
    """``tokens`` compared in ``batches`` batches, ``differ`` of them with other bytes, ``max_abs`` the largest difference, ``first`` in words."""

    batches: int
    tokens: int
    differ: int
    max_abs: float
    first: str = ""

    @property
    def same(self) -> bool:
        """Something was compared, and every byte agreed."""
        return self.tokens > 0 and self.differ == 0


def replay(batches: Iterable[Batch], score: Score, *, weights: str | None = None) -> Replayed:
    """Compare stored log-probabilities with those that ``score`` gives now.

    Args:
        batches: of a store.
        score: the scorer, in whatever layout.
        weights: digest of the weights that score; a batch that other weights sampled is refused.

    Raises:
        StoreError: a batch without log-probabilities, one of other weights, or a scorer that answers about other tokens.
    """
    count = tokens = differ = 0
    largest, first = 0.0, ""
    for number, batch in enumerate(batches):
        if weights is not None and batch.about.weights != weights:
            theirs = batch.about.weights or "unknown weights"
            raise StoreError(
                f"replay: batch {number} (step {batch.about.step}) was sampled by {theirs}, these weights are {weights}: choose batches of one state"
            )
        stored, found = batch.responses, score(batch)
        if len(found) != len(stored):
            raise StoreError(f"replay: batch {number} has {len(stored)} sequences, {len(found)} were scored")
        for i, (was, row) in enumerate(zip(stored, found, strict=True)):
            now = np.asarray(row, dtype=np.float32)
            if now.shape != was.shape:
                raise StoreError(f"replay: batch {number}, sequence {i}: {list(was.shape)} log-probabilities are stored, {list(now.shape)} were scored")
            other = was.view(np.uint32) != now.view(np.uint32)
            if other.any():
                with np.errstate(invalid="ignore"):
                    far = np.abs(was[other].astype(np.float64) - now[other].astype(np.float64))
                largest = max(largest, float(np.where(np.isnan(far), np.inf, far).max()))
                at = int(np.argmax(other))
                first = first or f"batch {number}, sequence {i}, response token {at}: stored {was[at]!r}, now {now[at]!r}"
            tokens, differ = tokens + len(was), differ + int(other.sum())
        count += 1
    return Replayed(count, tokens, differ, largest, first)


def weights_of(model: Path) -> str:
    """The digest of an HF folder's weights, as :attr:`tio_megatron.rollouts.About.weights` has it."""
    with Checkpoint(model) as checkpoint:
        return manifest_digest(checkpoint.digests())


def scorer(model: Path, side: str, contract: str, folder: Path) -> Score:
    """A scorer that runs one engine in one layout, in a process of its own per batch.

    Args:
        model: folder of the HF checkpoint.
        side: as in a table of ``tio matrix``: ``megatron tp2+ep2``, ``vllm tp2``, ``stock megatron tp1``.
        contract: as ``TIO_CONTRACT``; empty: the one that the batch's ``about.extra["contract"]`` holds.
        folder: for settings, logs and recordings of the runs.

    Raises:
        ValueError: (when called) the batch names another contract, none at all, or the engine could not be run.
    """
    parsed = Side.parse(side)

    def score(batch: Batch) -> list[npt.NDArray[np.float32]]:
        about = batch.about
        named = contract or about.extra.get("contract") or ""
        if not parsed.stock and not named:
            known = about.contract or "unknown"
            raise StoreError(f"replay: a batch (step {about.step}) does not hold its contract; name it (--contract), its fingerprint is {known}")
        held = read(str(named)).contract if named else Contract()
        ours = held.fingerprint(version(held.family))
        if not parsed.stock and about.contract and ours != about.contract:
            theirs = f"{about.contract} with the kernels {about.kernels or 'unknown'}"
            raise StoreError(f"replay: sampled under the contract {theirs}; this one is {ours} with {version(held.family)}")
        table = Table(model, batch.sequences, (parsed,), (), held)
        rows = read_scored(record(table, parsed, folder, about.temperature))
        return [row.logprobs[len(row.logprobs) - (length - prompt) :] for row, length, prompt in zip(rows, batch.lengths, batch.prompts, strict=True)]

    return score
