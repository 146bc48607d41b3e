"""Differences that no formula makes: buffers nobody wrote, dropout, constants. Each returns a finding or None."""

from __future__ import annotations

import numpy as np
import torch

from tio_megatron.traces.reader import Trace
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.rounding import looks_like_rounding, one_rounding
from tio_megatron.verify.diagnosis.rules import relative


def unwritten(case: Case) -> Finding | None:
    """One side is no number where the other is one, and all inputs are numbers."""
    if case.point.op == "logprob" and case.kept and not any(bool(side.isnan().any()) for side in case.sides):
        return None  # minus infinity is the logarithm of a probability of 0: something was filtered
    bad = [~np.isfinite(side.squares(case.point.name)) & case.compared for side in (case.a, case.b)]
    for name in case.point.parents:
        for side in (case.a, case.b):
            if name in side.recorded and not np.isfinite(side.squares(name)[case.compared]).all():
                return None
    for label, mine, other in (("A", bad[0], bad[1]), ("B", bad[1], bad[0])):
        rows = np.flatnonzero(mine & ~other)
        if len(rows):
            count = f"{len(rows)} of {int(case.compared.sum())} tokens are NaN or infinite in {label}, though everything they are made of is finite"
            return Finding("framework", "unwritten", side=label, evidence=(count, case.names(rows)), cure=CURES["unwritten"])
    return None


def dropout(case: Case) -> Finding | None:
    """Zeros in random places and everything else larger by one factor."""
    if not case.kept or not case.sides[0].is_floating_point():
        return None
    a, b = (side[case.rows].to(torch.float64) for side in case.sides)
    if case.point.op == "add":
        stream = case.input(case.point.parents[0])
        if stream is None:
            return None
        a, b = a - stream[case.rows].to(torch.float64), b - stream[case.rows].to(torch.float64)
    for label, dropped, whole in (("B", b, a), ("A", a, b)):
        large = whole.abs() > 0.1 * whole.abs().mean()
        zero = (dropped == 0) & large
        part = float(zero.sum() / large.sum().clamp_min(1))
        kept = large & ~zero
        if not 0.01 < part < 0.95 or not bool(kept.any()):
            continue
        ratios = (dropped / whole)[kept]
        factor = float(ratios.median())
        if abs(factor * (1 - part) - 1) < 0.15 and float((ratios / factor - 1).abs().quantile(0.8)) < 0.2:
            said = f"in {label}, {100 * part:.3g}% of the elements are zero and the others are {factor:.4g} times those of the other side"
            return Finding("framework", "dropout", side=label, details={"rate": round(part, 3)}, evidence=(said,), cure=CURES["dropout"])
    return None


def rounded_result(case: Case) -> Finding | None:
    """One side is the other, rounded to a narrower type and kept in the wide one."""
    if not case.kept or not case.sides[0].is_floating_point() or case.dtypes[0] != case.dtypes[1]:
        return None
    a, b = (side[case.rows] for side in case.sides)
    for narrow in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        for label, rough, fine in (("A", a, b), ("B", b, a)):
            if narrow.itemsize < fine.dtype.itemsize and torch.equal(fine.to(torch.float32).to(narrow).to(fine.dtype), rough):
                name = str(narrow).removeprefix("torch.")
                said = f"{label}'s values are the other side's, every one rounded to {name} and kept as {str(fine.dtype).removeprefix('torch.')}"
                return Finding("framework", "extra-rounding", side=label, details={"rounded_to": name}, evidence=(said,), cure=CURES["extra-rounding"])
    return None


def garbage(case: Case) -> Finding | None:
    """A few rows have nothing to do with the other side's, and all others are equal: they hold what was in the memory before, or zeros."""
    rows, same = np.flatnonzero(case.differs), case.compared & ~case.differs
    if not case.kept or not case.sides[0].is_floating_point() or 3 * same.sum() < len(rows):
        return None
    a, b = (side[rows].to(torch.float64).reshape(len(rows), -1) for side in case.sides)
    sizes = [side.square().mean(-1).sqrt() for side in (a, b)]
    alike = (a * b).mean(-1) / (sizes[0] * sizes[1]).clamp_min(1e-300)
    if a.shape[1] < 8 or bool((alike.abs() > 0.6).any()):
        return None
    usual = float(np.sqrt(np.median(case.a.squares(case.point.name)[same]) / a.shape[1]))
    strange = [float((size.clamp_min(1e-9) / max(usual, 1e-30)).log().abs().median()) for size in sizes]
    side = "A" if strange[0] > strange[1] + 0.5 else "B" if strange[1] > strange[0] + 0.5 else ""
    zero = [bool((part == 0).all()) for part in (a, b)]
    what = (
        f"they are zero in {'A' if zero[0] else 'B'}"
        if any(zero)
        else f"their sizes are {float(sizes[0].median()):.3g} in A and {float(sizes[1].median()):.3g} in B"
    )
    said = f"{len(rows)} tokens differ altogether and {int(same.sum())} not in a bit: {what}, {usual:.3g} elsewhere"
    return Finding("framework", "unwritten", side=side, evidence=(said, case.names(rows)), cure=CURES["unwritten"])


def unknown_inputs(case: Case) -> Finding:
    """The outputs differ, and what they are made of was not kept."""
    gap = relative(*(side[case.rows] for side in case.sides))
    size = "as rounding does" if looks_like_rounding(gap / 4, min(case.dtypes, key=lambda kind: kind.itemsize)) else "more than rounding does"
    said = f"the outputs differ by {gap:.2g}, {size}; inputs or parameters of this point were not kept on both sides, so no rule could be tried"
    return Finding("unknown", "", evidence=(said,), cure="Record both sides again with --keep all, with a recorder that sees the inputs of this point.")


def constant(case: Case) -> Finding | None:
    """One side is the other times a constant."""
    if not case.kept or not case.sides[0].is_floating_point():
        return None
    a, b = (side[case.rows].to(torch.float64) for side in case.sides)
    ratio = float((a * b).sum() / (a * a).sum().clamp_min(1e-30))
    gap = relative(a, b)
    left = relative(a * ratio, b)
    noise = max(one_rounding(kind) for kind in case.dtypes)
    far = abs(ratio - 1) / max(abs(ratio), 1e-30)  # of B, as the gap is
    # Rounding leaves the mean factor at 1: one that makes up most of the difference was multiplied.
    if a.numel() >= 64 and far > max(0.7 * gap, 2e-6) and (left < 0.1 * gap or left <= noise < far):
        return Finding("framework", "scale", details={"ratio": ratio}, evidence=(f"B is {ratio:.6g} times A",), cure=CURES["scale"])
    return None


_WIDE = ("router_logits", "expert_probs", "logits", "logprob_rows", "logprob")
"""Points that are fp32 in a model of any type."""


def other_type(case: Case) -> Finding | None:
    """One side keeps in a wide type what the other rounds, and that is all that is seen."""
    types = case.dtypes
    if types[0] == types[1] or not all(kind.is_floating_point for kind in types):
        return None
    gap = relative(*(side[case.rows] for side in case.sides))
    if gap > 0.01:
        return None
    names = [str(kind).removeprefix("torch.") for kind in types]
    side, reason = _of_another_type(case)
    said = f"{names[0]} in A and {names[1]} in B; the values differ by {gap:.2g}, as rounding does"
    details = {"dtype_a": names[0], "dtype_b": names[1]}
    return Finding("framework", "dtype", side=side, side_reason=reason, details=details, evidence=(said,), cure=CURES["dtype"])


def _of_another_type(case: Case) -> tuple[str, str]:
    """(side, reason): the one whose type is not that of the point's own inputs; none where the sides compute in other types from there on."""
    types = case.dtypes
    if case.point.part in _WIDE:
        side = "A" if types[0].itemsize < types[1].itemsize else "B"
        return side, f"{side} departs from the usual: this point is fp32 in a model of any type"
    given = [min(kinds, key=lambda kind: kind.itemsize, default=None) for kinds in (_given(case, side) for side in (case.a, case.b))]
    if given[0] != given[1] or given[0] is None:
        return "", "the sides compute in other types from there on: the checkpoint's dtype decides which of them is meant"
    off = [label for label, kind in zip("AB", types, strict=True) if kind != given[0]]
    if len(off) == 1:
        return off[0], f"{off[0]} departs from the type of what the point is made of ({str(given[0]).removeprefix('torch.')} on both sides)"
    return "", "neither side keeps the type of what the point is made of"


def _given(case: Case, side: Trace) -> list[torch.dtype]:
    """The types of the point's inputs on one side, as recorded; those that are fp32 anyway and ids left out."""
    parts = [name for name in case.point.parents if name in side.recorded and name.rsplit(".", 1)[-1] not in _WIDE]
    kinds = [getattr(torch, str(side.recorded[name]["dtype"])) for name in parts]
    return [kind for kind in kinds if kind.is_floating_point]
