"""Sequences of many lengths as micro-batches of one shape per step, the same number on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """``tokens`` [b, s] int64, padded on the right with ``0``; ``labels`` [b, s] the next token of each; ``weights`` [b, s] fp32 of the
    loss of each, 0 on padding; ``index`` [b] number of the sequence, -1 for one that only fills the batch; ``lengths`` [b].
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    index: tuple[int, ...]
    lengths: tuple[int, ...]


def steps(sequences: Sequence[Sequence[int]], *, ranks: int, rank: int, size: int, multiple: int) -> list[Batch]:
    """This rank's batch of each scoring step. Sequences are sorted by length, so that little is padded.

    Args:
        sequences: tokens of each, at least two.
        ranks: data-parallel ranks; all of them take every step, some perhaps with nothing of their own.
        rank: this one.
        size: sequences in a batch.
        multiple: what padded lengths must divide by (tensor parallel size, for sequence parallelism).
    """
    order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
    made = []
    for start in range(0, len(order), size * ranks):
        group = order[start : start + size * ranks]
        mine = group[rank * size : (rank + 1) * size]
        made.append(batch(sequences, mine, None, size=min(size, len(group)), length=max(len(sequences[i]) for i in group), multiple=multiple))
    return made


def batch(
    sequences: Sequence[Sequence[int]], index: Sequence[int], weights: Sequence[Sequence[float]] | None, *, size: int, length: int, multiple: int
) -> Batch:
    """The sequences numbered ``index`` as one batch of ``size`` rows of at least ``length`` tokens."""
    width = -(-length // multiple) * multiple
    tokens = torch.zeros(size, width, dtype=torch.int64)
    labels = torch.zeros(size, width, dtype=torch.int64)
    weight = torch.zeros(size, width, dtype=torch.float32)
    for row, number in enumerate(index):
        sequence = torch.tensor(sequences[number], dtype=torch.int64)
        tokens[row, : len(sequence)] = sequence
        labels[row, : len(sequence) - 1] = sequence[1:]
        if weights is not None:
            weight[row, : len(sequence) - 1] = torch.tensor(weights[number], dtype=torch.float32)
    fill = size - len(index)
    return Batch(tokens, labels, weight, (*index, *[-1] * fill), (*[len(sequences[i]) for i in index], *[1] * fill))
