"""Tokens that one side has at a point and the other has not, though it has them elsewhere: a damaged trace, or a recorder that lost them.

A token that a side never saw (it came out of a prefix cache, or was not scored) is no such thing, nor are the points behind the last norm, which engines
compute for some tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tio_megatron.models import Point
from tio_megatron.traces.reader import Trace


def one_sided(a: Trace, b: Trace, graph: Sequence[Point]) -> list[str]:
    """A sentence for each point that both traces name and where one lacks tokens."""
    shared = [point.name for point in graph if point.name in a.recorded and point.name in b.recorded and point.layer is not None]
    seen = [_seen(side, shared) for side in (a, b)]
    said = []
    for name in shared:
        has = [side.columns(name) > 0 for side in (a, b)]
        for i, label in enumerate("AB"):
            lost = has[1 - i] & ~has[i] & seen[i]
            if lost.any():
                said.append(f"{name}: {int(lost.sum())} tokens are missing in {label}, which has them at other points; the first is {_where(a, lost)}")
    if not said and shared and not (seen[0] & seen[1]).any():
        return [f"no token was recorded on both sides: {int(seen[0].sum())} in A, {int(seen[1].sum())} in B"]
    return said


def _seen(side: Trace, names: list[str]) -> npt.NDArray[np.bool_]:
    seen: npt.NDArray[np.bool_] = np.zeros(sum(side.lengths), dtype=np.bool_)
    for name in names:
        seen |= side.columns(name) > 0
    return seen


def _where(side: Trace, rows: npt.NDArray[np.bool_]) -> str:
    sequence, position = side.where(int(np.argmax(rows)))
    return f"token {position} of sequence {sequence}"
