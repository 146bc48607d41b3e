"""How far a side may be from the exact result by order and rounding alone: beyond that a difference is not called an order."""

from __future__ import annotations

import torch

from tio_megatron.verify.diagnosis.case import Case

_ONE = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
"""Relative root mean square of one rounding (of values spread over a binade: 0.29 units in the last place), rounded up."""
_MARGIN = 1.5
_INSIDE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""What sums, exponentials and divisions in the wide types add up to; in the narrow types all of that is below one rounding."""


def one_rounding(dtype: torch.dtype) -> float:
    """Relative error up to which a result in ``dtype`` may be the exact one: one rounding of it, and what sums in fp32 do."""
    return max(_MARGIN * _ONE.get(dtype, 2.0**-23), _INSIDE.get(dtype, 0.0))


def in_its_type(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the narrowest type that holds all of its values: an engine may cast a bf16 result to fp32 before anybody sees it."""
    for narrow in (torch.bfloat16, torch.float16):
        if x.dtype == torch.float32 and torch.equal(x.to(narrow).to(x.dtype), x):
            return x.to(narrow)
    return x


def looks_like_rounding(error: float, dtype: torch.dtype) -> bool:
    """Whether a side that is ``error`` away from the exact result may differ by order alone."""
    return error <= one_rounding(dtype)


def sum_rounding(terms: torch.Tensor, dtype: torch.dtype) -> float:
    """The same for sums of ``terms`` [r, c, K] (fp64) kept in fp32: it grows with the root of K, and with how far the terms cancel."""
    if dtype not in _INSIDE:
        return one_rounding(dtype)
    k = terms.shape[-1]
    size = terms.sum(-1).square().mean().sqrt().clamp_min(1e-30)
    cancelled = float((terms.square().sum(-1).mean().sqrt() / size).clamp(1.0, 1e6))
    return _ONE[dtype] * (4 + k**0.5) * cancelled


def too_large_alone(case: Case) -> str:
    """What is wrong with calling it rounding, in words: few elements differ, and one by more than a last bit. An order that moves elements by more than that
    keeps narrow partial sums, and those move most elements. "" where that is not so."""
    if not case.kept or not case.sides[0].is_floating_point() or case.dtypes[0] != case.dtypes[1]:
        return ""
    compared = torch.from_numpy(case.compared)
    a, b = (side[compared].flatten(1).to(torch.float64) for side in case.sides)
    differs = a != b
    part = float(differs.to(torch.float64).mean())
    if part > 0.02:
        return ""
    dtype = case.dtypes[0]
    unit = _ONE[dtype] * 4 if dtype in (torch.bfloat16, torch.float16) else 1e-5  # a unit in the last place is at most that much of a value
    size = a.square().mean(-1, keepdim=True).sqrt()
    far = differs & ((a - b).abs() > 1.05 * unit * torch.maximum(a.abs(), b.abs()) + 2.0**-18 * size)
    if not bool(far.any()):
        return ""
    worst = float(((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp_min(1e-30))[far].max())
    return f"{int(differs.sum())} of {differs.numel()} elements differ, one by {worst:.2g} of it: an order that moves an element so far moves most of them"


def too_many_for_an_order(case: Case, errors: tuple[float, float], gap: float) -> str:
    """What is wrong with calling it an order, in words, where one formula with its rounding points gives one side to the last bit (``errors``: of
    the best one on each side): another order of sums kept
    in fp32 moves a bf16 result only where it lies beside a rounding boundary, which is rare. "" where that is not so."""
    if case.dtypes[0] != case.dtypes[1] or case.dtypes[0] not in (torch.bfloat16, torch.float16):
        return ""
    if min(errors) > 0.02 * gap:
        return ""
    a, b = (side[case.rows].flatten(1) for side in case.sides)
    moved = a != b
    part = float(moved[moved.any(-1)].to(torch.float64).mean()) if bool(moved.any()) else 0.0
    if part < 0.25:
        return ""
    exact = "A" if errors[0] < errors[1] else "B"
    return f"known steps give {exact} to the last bit, and {100 * part:.3g}% of the elements of the other side differ: an order of sums in fp32 moves few"


def leaning(case: Case) -> str:
    """What is wrong with calling it an order, in words, where nearly every row of one side is longer than the other's: orders have no such preference, an
    epsilon or a factor has. "" where that is not so."""
    a, b = (side[case.rows].flatten(1).to(torch.float64) for side in case.sides)
    along = ((a - b) * b).sum(-1) / b.square().sum(-1).clamp_min(1e-300)
    more, less = int((along > 0).sum()), int((along < 0).sum())
    if more + less < 16 or min(more, less) > 0.06 * (more + less):
        return ""
    side = "A" if more > less else "B"
    return f"{max(more, less)} of {len(along)} rows are larger in {side}, by {float(along.abs().median()):.2g} each: an order has no such preference"
