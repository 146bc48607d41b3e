"""One differing point with everything that is known about it: what the rules and the order search work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tio_megatron.models import Point
from tio_megatron.traces.reader import Trace

MOST_ROWS = 48
EXPERT_ROWS = ("expert_gate", "expert_up", "expert_act", "expert_scaled", "expert_out")
"""What names of points begin with whose rows are those of a token's experts."""


@dataclass
class Case:
    """``point`` is the first that differs; ``differs`` [T] says at which tokens. Every earlier recorded point is equal on both sides.

    Values come in their own types, whatever axes they were recorded with, as [T, n], experts' rows as [T, K, n]; inputs are A's, which are B's too.
    """

    a: Trace
    b: Trace
    point: Point
    differs: npt.NDArray[np.bool_]
    compared: npt.NDArray[np.bool_]
    graph: dict[str, Point] = field(default_factory=dict)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Rows to look at: differing ones, at most MOST_ROWS, spread over all; [r] int64."""
        found = np.flatnonzero(self.differs)
        chosen = found[np.unique(np.linspace(0, len(found) - 1, min(MOST_ROWS, len(found))).round().astype(np.int64))]
        return torch.from_numpy(chosen)

    @cached_property
    def kept(self) -> bool:
        """Whether both sides kept the point's tensor, with the axes that it needs."""
        return all(_rows(side, self.point.name) is not None for side in (self.a, self.b))

    @cached_property
    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole tensors of A and B."""
        a, b = _rows(self.a, self.point.name), _rows(self.b, self.point.name)
        assert a is not None and b is not None
        return a, b

    def input(self, name: str) -> torch.Tensor | None:
        """The tensor of an earlier point, from whichever side kept it; None where one side did not record it: it may differ."""
        if name not in self.a.recorded or name not in self.b.recorded:
            return None
        for side in (self.a, self.b):
            if (found := _rows(side, name)) is not None:
                return found
        return None

    def parent(self, part: str) -> torch.Tensor | None:
        """The tensor of the parent whose name ends in ``part``."""
        return next((self.input(name) for name in self.point.parents if name.rsplit(".", 1)[-1] == part), None)

    def weight(self, name: str) -> torch.Tensor | None:
        """A parameter, from whichever side kept it (they are equal here)."""
        for side in (self.a, self.b):
            if (found := side.weight(name)) is not None:
                return found
        return None

    @cached_property
    def parameters(self) -> list[str]:
        """HF names of the parameters, biases too, of the point's modules, that either side has; experts' names are written out."""
        names = sorted(self.a.weights.keys() | self.b.weights.keys())
        found = []
        for pattern in self.point.weights:
            start, star, end = pattern.rpartition(".")[0].partition("*")
            modules = [(name, name.rpartition(".")[0]) for name in names]
            found += [name for name, module in modules if (module.startswith(start) and module.endswith(end) if star else module == start)]
        return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".") if part.isdigit()] or [0])

    def fact(self, name: str, default: Any = None) -> list[Any]:
        """The distinct values that the sides state for a fact, A's first."""
        found = [side.facts[name] for side in (self.a, self.b) if side.facts.get(name) is not None]
        return list(dict.fromkeys(found)) or ([default] if default is not None else [])

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of the point on both sides, as recorded."""
        found = [getattr(torch, str(side.recorded[self.point.name]["dtype"])) for side in (self.a, self.b)]
        return found[0], found[1]

    def names(self, rows: npt.NDArray[np.int64], most: int = 3) -> str:
        """Some rows in words."""
        places = [self.a.where(int(row)) for row in rows[:most]]
        more = f" and {len(rows) - most} more" if len(rows) > most else ""
        return ", ".join(f"token {position} of sequence {sequence}" for sequence, position in places) + more


def _rows(side: Trace, name: str) -> torch.Tensor | None:
    """The tensor of a point, [T, n], or [T, K, n] where its rows are those of a token's experts; None where it was not kept, or has no such axis."""
    found = side.values(name)
    if found is None or not name.rsplit(".", 1)[-1].startswith(EXPERT_ROWS):
        return None if found is None else found.reshape(len(found), -1)
    return found if found.dim() == 3 else None
