"""The sum over a token's experts: where rows are weighted, whether they are rounded first, and in which order they are added.

Legend: r rows of the case, K chosen experts in ascending id, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tio_megatron.models import SCALED
from tio_megatron.verify.diagnosis import faults
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.orders import Found, combine_orders, search
from tio_megatron.verify.diagnosis.orders_of import narrow_type, order_finding, passes_of
from tio_megatron.verify.diagnosis.rounding import looks_like_rounding, too_large_alone
from tio_megatron.verify.diagnosis.rules import Rule, explain, relative, rounded

_COLUMNS = 48


@dataclass(frozen=True)
class Rows:
    """Rows to add, [r, K, H] fp64, with what multiplies them, [r, K] fp64 (ones where they are weighted already)."""

    out: torch.Tensor
    weights: torch.Tensor


def combined_from(case: Case) -> list[str]:
    """The points that the sum is made of, for these two engines."""
    early = [name for name in case.point.parents if name.rsplit(".", 1)[-1] in SCALED]
    if _weighted_early(case) == (True, True):
        return [name for name in case.point.parents if name in early or name.endswith("expert_ids")]
    return [name for name in case.point.parents if name not in early]


def combine(case: Case) -> Finding | None:
    """Why two sums over experts differ."""
    early = _weighted_early(case)
    if early[0] != early[1]:
        return _weighting(case, "A" if early[0] else "B")
    rows = recorded(case)
    ids = case.parent("expert_ids")
    if rows is None or ids is None:
        return faults.constant(case) or faults.unknown_inputs(case)
    a, b = (side[case.rows] for side in case.sides)
    exact = (rows.out * rows.weights[..., None]).sum(1)
    explained = explain(
        [
            Rule({"scale": "1", "combine": "weighted"}, lambda: exact),
            Rule({"scale": "1", "combine": "unweighted"}, lambda: rows.out.sum(1)),
        ],
        a,
        b,
    )
    assert explained is not None
    said = f"A comes out within {explained.a.error:.2g}, B within {explained.b.error:.2g}; they differ by {explained.gap:.2g}"
    if explained.axes:
        what = (f"experts' rows: A {explained.a.rule.axes['combine']}, B {explained.b.rule.axes['combine']}", f"computed anew from the recorded rows: {said}")
        side = "A" if explained.a.rule.axes["combine"] == "unweighted" else "B"
        return Finding("framework", "router-normalise", side=side, details={"axes": ["combine"]}, evidence=what, cure=CURES["router-normalise"])
    found = _orders(case, rows, ids)
    line = f"equal inputs, one formula for both, computed anew from them: {said}"
    if not all(side.name for side in found) and (whole := _unrounded(case, ids)) is not None:
        other = _orders(case, whole, ids)
        if all(x.name or y.name for x, y in zip(found, other, strict=True)):
            return _rounded_rows(case, found, other, line)
    if all(side.name for side in found):
        return order_finding(case, found, [line])
    if faults.constant(case) or too_large_alone(case):
        return None
    if looks_like_rounding(max(explained.a.error, explained.b.error), _narrow(case)):
        return order_finding(case, found, [line])
    return None


def _weighted_early(case: Case) -> tuple[bool, bool]:
    """Whether A and B weight a row before its down projection."""
    early = next(name for name in case.point.parents if name.rsplit(".", 1)[-1] == SCALED[1])
    return early in case.a.recorded, early in case.b.recorded


def _narrow(case: Case) -> torch.dtype:
    return min(case.dtypes, key=lambda kind: kind.itemsize)


def recorded(case: Case) -> Rows | None:
    """What is added, as it was recorded; None where it was not kept."""
    scaled, out, probabilities = (case.parent(part) for part in (SCALED[1], "expert_out", "expert_probs"))
    if scaled is not None:
        rows = scaled[case.rows].to(torch.float64)
        return Rows(rows, torch.ones(rows.shape[:2], dtype=torch.float64))
    if out is None or probabilities is None:
        return None
    return Rows(out[case.rows].to(torch.float64), probabilities[case.rows].to(torch.float64))


def _unrounded(case: Case, ids: torch.Tensor) -> Rows | None:
    """Rows as an operator holds them that never stores them: computed anew in fp32 from the activations and the down projections."""
    early = _weighted_early(case) == (True, True)
    here = case.point.name.removesuffix("mlp_out")
    inner, probabilities = case.input(f"{here}{SCALED[0] if early else 'expert_act'}"), case.parent("expert_probs")
    if inner is None or (probabilities is None and not early):
        return None
    rows = _down(case, inner[case.rows].to(torch.float64), ids[case.rows])
    if rows is None:
        return None
    weights = torch.ones(rows.shape[:2], dtype=torch.float64)
    if not early and probabilities is not None:
        weights = probabilities[case.rows].to(torch.float64)
    return Rows(rows.to(torch.float32).to(torch.float64), weights)


def _down(case: Case, inner: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """[r, K, H] exact products of ``inner`` [r, K, I] with the down projections of ``ids`` [r, K]."""
    out: torch.Tensor | None = None
    down = case.graph[f"layers.{case.point.layer}.expert_out"].weights[0]
    for expert in ids.unique().tolist():
        weight = case.weight(down.replace("*", str(expert)))
        if weight is None or weight.shape[1] != inner.shape[-1]:
            return None
        out = torch.zeros(*ids.shape, weight.shape[0], dtype=torch.float64) if out is None else out
        out[ids == expert] = inner[ids == expert] @ weight.to(torch.float64).t()
    return out


def _orders(case: Case, rows: Rows, ids: torch.Tensor) -> tuple[Found, Found]:
    a, b = (side[case.rows] for side in case.sides)
    columns = (a != b).sum(0).argsort(descending=True, stable=True)[:_COLUMNS]
    low = narrow_type(case)
    orders = combine_orders(rows.out[..., columns], rows.weights, ids[case.rows].to(torch.int64), int(case.a.shape.get("experts") or 0), low)
    return search(orders, a[:, columns], b[:, columns], passes_of(case, case.rows))


def _rounded_rows(case: Case, found: tuple[Found, Found], other: tuple[Found, Found], line: str) -> Finding:
    """One side adds rows as they were stored, the other as its operator held them."""
    said = [line]
    details: dict[str, Any] = {}
    for name, usual, whole in zip("AB", found, other, strict=True):
        rows, way = ("rows rounded first", usual) if usual.name else ("rows not rounded before they are weighted and added", whole)
        more = f" ({way.ambiguous} other known orders give the same bytes)" if way.ambiguous else ""
        said.append(f"{name}: {rows}; {way.name}{more}")
        details |= {f"order_{name.lower()}": way.name, f"same_bytes_{name.lower()}": way.others}
    if not any(side.name for side in found):
        return order_finding(case, other, said[:1])
    side = "B" if found[0].name else "A"
    reason = f"{side} departs from the usual (rows rounded before they are weighted and added)"
    return Finding("framework", "extra-rounding", side=side, side_reason=reason, details=details, evidence=tuple(said), cure=CURES["extra-rounding"])


def _weighting(case: Case, side: str) -> Finding | None:
    """One engine multiplies by the probability before the down projection."""
    other = "B" if side == "A" else "A"
    said = [f"{side} multiplies a row by its probability before the down projection, {other} behind it: the same mathematics, other roundings"]
    gap = relative(*(part[case.rows] for part in case.sides))
    here = case.point.name.removesuffix("mlp_out")
    act, probabilities, ids = case.input(f"{here}expert_act"), case.parent("expert_probs"), case.parent("expert_ids")
    if act is not None and probabilities is not None and ids is not None:
        x, p, chosen = act[case.rows].to(torch.float64), probabilities[case.rows].to(torch.float64)[..., None], ids[case.rows]
        dtype = _narrow(case)
        early, late = _down(case, rounded(x * p, dtype), chosen), _down(case, x, chosen)
        if early is not None and late is not None:
            made = {side: rounded(early, dtype).sum(1), other: (rounded(late, dtype) * p).sum(1)}
            errors = {name: relative(made[name], part[case.rows]) for name, part in zip("AB", case.sides, strict=True)}
            if max(errors.values()) > max(2 * gap, 1e-6) and not looks_like_rounding(max(errors.values()), dtype):
                return None
            said.append(f"computed anew that way from the recorded activations: A comes out within {errors['A']:.2g}, B within {errors['B']:.2g}")
    elif not looks_like_rounding(gap, _narrow(case)):
        return None
    found = Finding("framework", "expert-weighting", side=side, evidence=tuple(said), cure=CURES["expert-weighting"])
    return replace(found, details={"weighted_before_down_projection": side})
