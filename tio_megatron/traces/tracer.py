"""A tracer for any model: say which tokens a forward pass computes, then name what it computes. Off, it costs a comparison with None.

with TraceWriter(folder, sequences, engine="mine", shape={"layers": 2, "moe": [True, True]}, keep=True) as writer:
    tracer = Tracer(writer)
    with tracer.rows([(0, 0, 17), (1, 0, 5)]):      # tokens 0 to 16 of sequence 0, then tokens 0 to 4 of sequence 1
        ...
        tracer.point("layers.0.attn_norm", x)       # [22, H], or [1, 22, H]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tio_megatron.traces.writer import TraceWriter


class Tracer:
    """Passes what a model computes to a writer, under canonical names.

    ``suspended`` while True, nothing is recorded.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.suspended = False
        self._starts = [sum(writer.lengths[:i]) for i in range(len(writer.lengths))]
        self._at: torch.Tensor | None = None

    @contextmanager
    def rows(self, runs: Sequence[tuple[int, int, int] | None | int]) -> Iterator[None]:
        """In this context a forward pass computes these tokens in this order.

        Args:
            runs: ``(sequence, first, stop)``, or a number ``n`` for ``n`` padding tokens.
        """
        parts = []
        for run in runs:
            if isinstance(run, int):
                parts.append(torch.full((run,), -1, dtype=torch.int64))
            elif run is not None:
                sequence, first, stop = run
                if not 0 <= first <= stop <= self.writer.lengths[sequence]:
                    raise ValueError(f"tokens {first} to {stop} of a sequence of {self.writer.lengths[sequence]}")
                parts.append(torch.arange(first, stop) + self._starts[sequence])
        with self.at(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)):
            yield

    @contextmanager
    def at(self, places: torch.Tensor) -> Iterator[None]:
        """The same, by row numbers of the trace ([n] int64, -1 for padding)."""
        before, self._at = self._at, places
        self.writer.forward(places)
        try:
            yield
        finally:
            self._at = before

    @property
    def places(self) -> torch.Tensor | None:
        """Row numbers of the tokens being computed, or None outside a pass."""
        return None if self.suspended else self._at

    def point(self, name: str, value: torch.Tensor, *, columns: int | None = None, width: Sequence[int] | None = None) -> None:
        """Record ``value`` [n, ...], or the same with axes of size 1 in front or a batch and a sequence axis that multiply to n."""
        at = self.places
        if at is None:
            return
        shape = list(value.shape)
        while value.shape[0] != len(at) and value.dim() > 1:
            value = value.flatten(0, 1)
        if value.shape[0] != len(at):
            raise ValueError(f"{name}: a tensor of {shape} for {len(at)} tokens")
        self.writer.put(name, value, at, columns=columns, width=width)

    def experts(self, name: str, value: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, top_k: int) -> None:
        """Record rows of experts: ``value`` [m, W] belongs to the tokens ``tokens`` [m] of this pass, as their ``slots``-th expert in ascending id."""
        at = self.places
        if at is None:
            return
        width = value.shape[-1]
        self.writer.put(name, value, at[tokens.cpu()], columns=slots.cpu() * width, width=(top_k, width))
