"""Which sample and which position of it each row of an activation belongs to, whatever part of the batch this rank holds.

Legend: ``S`` positions and ``B`` samples of a micro-batch, ``T`` packed tokens, ``C`` ranks of context parallelism.
Rows are numbered as activations lie in memory: ``[s, b]`` with ``b`` fastest, or packed tokens in order.

Context parallelism cuts a sample in ``2 * C`` equal chunks and gives rank ``r`` the chunks ``r`` and ``2 * C - 1 - r`` (Megatron-core's rule,
which balances causal attention). Packed samples are cut one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The samples of one micro-batch and this rank's part of them.

    Args:
        starts: ``[samples + 1]`` where packed samples start in the whole micro-batch; ``None``: each column of ``[S, B]`` is a sample. Tokens
            behind the last start (padding) count as one more sample.
        rank: this rank's place in the context-parallel group.
        ranks: size of that group.
    """

    starts: Tensor | None = None
    rank: int = 0
    ranks: int = 1

    def rows(self, length: int, batch: int) -> tuple[Tensor, Tensor]:
        """The sample and the position of each of this rank's ``length * batch`` rows, both ``[length * batch]`` int64.

        Args:
            length: this rank's part of the sequence axis, slices of sequence parallelism joined.
            batch: ``B``; 1 for packed samples.

        Raises:
            ValueError: samples that do not divide into the chunks of context parallelism.

        >>> Sequences(rank=1, ranks=2).rows(4, 2)[1].tolist()
        [2, 2, 3, 3, 4, 4, 5, 5]
        >>> [t.tolist() for t in Sequences(torch.tensor([0, 2, 5])).rows(6, 1)]
        [[0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0]]
        """
        if self.starts is None:
            position = self._chunks(0, length * self.ranks)
            return torch.arange(batch).repeat(length), position.repeat_interleave(batch)
        if batch != 1:
            raise ValueError(f"packed samples: a batch of {batch} rows is not supported; pack everything in one row")
        edges: list[int] = self.starts.tolist()
        total = length * self.ranks
        if edges[0] != 0 or edges[-1] > total or edges != sorted(edges):
            raise ValueError(f"packed samples: starts {edges} do not ascend from 0 to at most {total}")
        edges += [total] if edges[-1] < total else []
        sizes = [hi - lo for lo, hi in zip(edges[:-1], edges[1:], strict=True)]
        samples = [torch.full((size // self.ranks,), number, dtype=torch.int64) for number, size in enumerate(sizes)]
        positions = [self._chunks(number, size) for number, size in enumerate(sizes)]
        none = [torch.empty(0, dtype=torch.int64)]
        return torch.cat(samples or none), torch.cat(positions or none)

    def count(self, length: int, batch: int) -> int:
        """How many samples :meth:`rows` numbers.

        >>> Sequences(torch.tensor([0, 2, 5])).count(6, 1), Sequences(torch.tensor([0, 2, 5])).count(5, 1), Sequences().count(5, 3)
        (3, 2, 3)
        """
        return batch if self.starts is None else len(self.starts) - 1 + self.has_tail(length)

    def has_tail(self, length: int) -> bool:
        """Whether there are tokens behind the last start."""
        return self.starts is not None and int(self.starts[-1]) < length * self.ranks

    def _chunks(self, sample: int, size: int) -> Tensor:
        """This rank's positions of a sample of ``size`` tokens."""
        if self.ranks == 1:
            return torch.arange(size)
        if size % (2 * self.ranks):
            raise ValueError(f"context parallelism: sample {sample} has {size} tokens, which do not divide into {2 * self.ranks} chunks; pad it")
        chunk = size // (2 * self.ranks)
        first, second = self.rank * chunk, (2 * self.ranks - 1 - self.rank) * chunk
        return torch.cat((torch.arange(first, first + chunk), torch.arange(second, second + chunk)))
