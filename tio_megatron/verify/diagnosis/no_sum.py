"""Points where nothing is summed: can a rounding more, or another exp, cos or fma, be what moved the elements?

A rounding moves an element by a unit or two in its last place, up as often as down. What moves elements farther, or all in one direction of the formula
(a later token's query a little on along its turn, an activation a little larger wherever its input is alike), is another function.

Legend: r rows of the case, D head size, n elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tio_megatron.verify.diagnosis.case import Case

_UNITS = 2.05
"""Units in the last place between two sides of which one rounds once more: its own half, up to twice as much after a product, and both results' halves."""
_WIDE = 2.0**-15
"""What another exp, cos or fma in fp32 may change, of the larger term: it moves an element only where the exact one lies beside a rounding boundary."""
_LEANS, _PART = 5.0, 0.25
"""Directions count as no chance from this many standard deviations on, and this mean of their signs."""
_BINS = 8


def no_rounding(case: Case, made: torch.Tensor) -> str:
    """Why the sides, of which ``made`` [r, ...] (fp64, not rounded) is the formula's result, do not differ by a rounding, in words; "" where they may.

    Said of bf16 and fp16 alone: in fp32 what exp and cos leave is larger than a unit, and has directions of its own.
    """
    dtype = min(case.dtypes, key=lambda kind: kind.itemsize)
    if dtype not in (torch.bfloat16, torch.float16):
        return ""
    a, b, made = (part.to(torch.float64).reshape(len(case.rows), -1) for part in (*(side[case.rows] for side in case.sides), made))
    real = a.isfinite() & b.isfinite() & made.isfinite()
    moved = (a != b) & real
    if not bool(moved.any()):
        return ""
    size = torch.maximum(torch.maximum(a.abs(), b.abs()), _terms(case, made))
    units = ((a - b).abs() / _unit(size, dtype))[moved]
    if float(units.max()) > _UNITS:
        far = int((units > _UNITS).sum())
        worst = f"one by {float(units.max()):.3g} units in the last place"
        return f"{far} of {int(moved.sum())} elements that differ do so by more than a rounding moves them, {worst}"
    low, high = ((made + sign * _WIDE * size).to(torch.float32).to(dtype).to(torch.float64) for sign in (-1, 1))
    if bool(((torch.minimum(a, b) >= low) & (torch.maximum(a, b) <= high))[moved].all()):
        return ""  # all of them lie beside a boundary
    signs = (a - b).sign() * moved
    for what, along, part in _directions(case, made):
        chosen = signs[part] * along[part].sign()
        count = int(chosen.count_nonzero())
        mean = float(chosen.sum()) / max(count, 1)
        if abs(mean) * count**0.5 > _LEANS and abs(mean) > _PART:
            return f"{100 * (1 + abs(mean)) / 2:.3g}% of {count} elements {what} differ in one direction: a rounding has none"
    return ""


def _unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of ``x`` in ``dtype``."""
    kind = torch.finfo(dtype)
    return torch.exp2(torch.frexp(x).exponent.to(torch.float64) - 1).clamp_min(kind.smallest_normal) * kind.eps


def _terms(case: Case, made: torch.Tensor) -> torch.Tensor:
    """[r, n]: the size of what a rounding between the steps is relative to, where that is not the result."""
    if case.point.op == "rope":
        first, second = _halves(case, made)
        pair = torch.hypot(first, second)
        return torch.cat([pair, pair], -1).reshape(made.shape)
    if case.point.op == "add":
        terms = [_flat(case, term, made) for term in map(case.input, case.point.parents)]
        return torch.stack([term.abs() for term in terms if term is not None] or [made.abs()]).amax(0)
    return made.abs()


def _halves(case: Case, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[r, heads, D / 2] twice: the two elements of each pair that is turned."""
    first, second = x.reshape(len(x), -1, int(case.a.shape["head_dim"])).chunk(2, -1)
    return first, second


def _flat(case: Case, x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    x = None if x is None else x[case.rows].to(torch.float64).reshape(len(case.rows), -1)
    return x if x is not None and x.shape == like.shape else None


def _directions(case: Case, made: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(elements in words, direction [r, n], which elements [r, n]): what another function would move them along."""
    everything = torch.ones_like(made, dtype=torch.bool)
    yield "(by size)", made, everything
    if case.point.op == "rope":
        first, second = _halves(case, made)
        turn = torch.cat([-second, first], -1)
        for at in range(first.shape[-1]):
            here = torch.zeros_like(turn, dtype=torch.bool)
            here[..., at] = here[..., at + first.shape[-1]] = True
            yield f"of frequency {at} (along their turn)", turn.reshape(made.shape), here.reshape(made.shape)
    if case.point.op == "swiglu":
        gate, up = (_flat(case, half, made) for half in map(case.input, case.point.parents))
        if gate is not None and up is not None:
            yield "(by the activation)", up, everything
            edges = torch.quantile(gate.flatten()[:100_000], torch.linspace(0, 1, _BINS + 1, dtype=torch.float64))
            for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                yield f"with a gate from {low:.3g} to {high:.3g} (by the activation)", up, (gate >= low) & (gate <= high)
    if case.point.op == "add":
        for name, term in zip(("stream", "branch"), map(case.input, case.point.parents), strict=True):
            if (along := _flat(case, term, made)) is not None:
                yield f"(by the {name})", along, everything
