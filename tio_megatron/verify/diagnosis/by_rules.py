"""Differences told by rules: each side is computed anew by every rule of its operator, and what the sides' rules differ in is the cause."""

from __future__ import annotations

from collections.abc import Iterable

from tio_megatron.verify.diagnosis import faults
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES, LOOK
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.no_sum import no_rounding
from tio_megatron.verify.diagnosis.orders_of import order_finding
from tio_megatron.verify.diagnosis.rounding import leaning, looks_like_rounding, too_large_alone, too_many_for_an_order
from tio_megatron.verify.diagnosis.rules import Explained, Rule, explain
from tio_megatron.verify.diagnosis.sides import departing

_RENAMED = {"visible": "mask"}
"""Axes whose name is not the cause's."""
_FEWEST_ROWS = 6
"""Rows of a norm below which nothing is told where others are equal: one factor moves a whole row, and all of them may grow by chance."""
_TABLES = "Compare the rotary frequencies, angles and tables of both sides, and their types."


def by_rules(case: Case, rules: Iterable[Rule]) -> Finding | None:
    """The finding of a point that is made by one formula; None where no rule explains the sides."""
    a, b = (side[case.rows] for side in case.sides)
    explained = explain(rules, a, b)
    if explained is None:
        return missing_inputs(case)
    if doubt := _too_few(case, explained):
        return Finding("unknown", "", evidence=(*same_formula(explained), doubt), cure=LOOK)
    if explained.axes:
        return framework(case, explained)
    dtype = max(case.dtypes, key=lambda dtype: -dtype.itemsize)
    worst = max(explained.a.error, explained.b.error)
    if faults.constant(case) or too_large_alone(case):
        return None
    summed = case.point.op not in ("rope", "swiglu", "add", "embedding", "scaling")
    if explained.gap <= 4 * worst + 1e-12 and looks_like_rounding(worst if summed else worst / 2, dtype):
        if case.point.op == "rope" and (doubt := too_many_for_an_order(case, explained.least, explained.gap)):
            return Finding("unknown", "", evidence=(*same_formula(explained), f"{doubt}, and another cos or fma too"), cure=_TABLES)
        if not summed and (doubt := no_rounding(case, explained.a.rule.compute())):
            return Finding("unknown", "", evidence=(*same_formula(explained), doubt), cure=_TABLES if case.point.op == "rope" else LOOK)
        if not summed:  # so there is no order
            said = (*same_formula(explained), "nothing is summed at this point, so one side rounds where the other does not, or uses another exp, cos or fma")
            return Finding("framework", "extra-rounding", evidence=said, cure=CURES["extra-rounding"])
        if doubt := not_an_order(case, explained):
            return Finding("unknown", "", evidence=(*same_formula(explained), doubt), cure=LOOK)
        return order_finding(case, None, same_formula(explained))
    return None


def not_an_order(case: Case, explained: Explained) -> str:
    """Why two sides that one rule explains up to rounding are not said to differ in an order, in words; "" where they are."""
    doubt = too_many_for_an_order(case, explained.least, explained.gap)
    if not doubt and case.point.op == "norm" and (doubt := leaning(case)):
        doubt += "; compare the epsilons, and factors near 1"
    return doubt


def _too_few(case: Case, explained: Explained) -> str:
    """Why what differs in a norm or a router is too little to tell anything, in words; "" where it is not."""
    rows, compared = int(case.differs.sum()), int(case.compared.sum())
    few = ""
    if explained.few and case.point.op in ("norm", "routing"):
        few = "1 element differs" if explained.few == 1 else f"{explained.few} elements differ"
    elif case.point.op == "norm" and rows < _FEWEST_ROWS < compared and looks_like_rounding(explained.gap, case.dtypes[0]):
        few = f"{rows} of {compared} rows differ"
    return f"only {few}, by rounding: an order, an epsilon and a rounding more all do that; record more tokens to tell" if few else ""


def framework(case: Case, explained: Explained) -> Finding:
    """The finding of two sides that follow different rules: the first axis is the cause."""
    rules = explained.a.rule, explained.b.rule
    axis = explained.axes[0]
    side, reason = departing(explained, {name: case.fact(name) for name in ("norm_eps", "rope_theta")})
    lines = [f"{name}: A {rules[0].axes[name]!r}, B {rules[1].axes[name]!r}" for name in explained.axes]
    lines.append(f"computed anew from the recorded inputs by these rules: {_errors(explained)}")
    return Finding(
        "framework",
        _RENAMED.get(axis, axis),
        side=side,
        side_reason=reason,
        details={"axes": list(explained.axes), "a": rules[0].axes[axis], "b": rules[1].axes[axis]},
        evidence=tuple(lines),
        cure=CURES[_RENAMED.get(axis, axis)],
    )


def _errors(explained: Explained) -> str:
    return f"A comes out within {explained.a.error:.2g}, B within {explained.b.error:.2g}; they differ by {explained.gap:.2g}"


def same_formula(explained: Explained) -> list[str]:
    """Evidence, where one rule explains both sides."""
    return [f"equal inputs, one formula for both, computed anew from them: {_errors(explained)}"]


def missing_inputs(case: Case) -> Finding:
    """What can be said without the point's inputs."""
    return faults.garbage(case) or faults.constant(case) or faults.unknown_inputs(case)
