"""Rows of experts: which token, and which of its experts, a row belongs to; and a look inside our own expert networks.

Legend: R rows on this rank, K chosen experts of a token, W width of a row, T tokens of the trace, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tio_megatron.layers import experts
from tio_megatron.traces.writer import TraceWriter


@dataclass(frozen=True)
class ExpertRows:
    """``at`` [R] rows of the trace (-1: not to be recorded here), ``slots`` [R] which of the token's experts in ascending id, of ``top_k``."""

    at: torch.Tensor
    slots: torch.Tensor
    top_k: int

    def put(self, writer: TraceWriter, name: str, value: torch.Tensor, *, first: int = 0, width: int | None = None) -> None:
        """Record ``value`` [R, w]: the columns from ``first`` on of rows of ``width`` (whole rows by default)."""
        width = value.shape[-1] if width is None else width
        writer.put(name, value, self.at, columns=self.slots * width + first, width=(self.top_k, width))


def rows_of(labels: torch.Tensor, numbers: torch.Tensor) -> ExpertRows:
    """From ``labels`` [R, 1 + K] (row of the trace, then the token's experts) and ``numbers`` [R], the expert of each row."""
    labels, numbers = labels.to("cpu", torch.int64), numbers.to("cpu", torch.int64)
    ids = labels[:, 1:].sort(dim=1).values
    found = ids == numbers[:, None]
    at = labels[:, 0].where(found.any(dim=1), -1)
    return ExpertRows(at, found.to(torch.int64).argmax(dim=1), ids.shape[1])


Seen = Callable[[str, torch.Tensor], None]


@contextmanager
def inside(seen: Seen) -> Iterator[None]:
    """In this context ``seen`` gets what our expert networks compute: "gate_up" [R, 2 I], "act" [R, I], "down" [R, H] (a rank's part, where I is cut)."""
    place: Any = experts
    product, activation = place.grouped_linear, place.swiglu
    second: list[bool] = [False]

    def grouped(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = product(*args, **kwargs)
        seen("down" if second[0] else "gate_up", out)
        second[0] = False
        return out

    def act(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = activation(*args, **kwargs)
        second[0] = True
        seen("act", out)
        return out

    # The names that the networks look up; nothing of theirs is replaced by anything that computes.
    place.grouped_linear, place.swiglu = grouped, act
    try:
        yield
    finally:
        place.grouped_linear, place.swiglu = product, activation
