"""Why a point differs: the question goes to the operator that made it, what it knows is tried in turn, and what nothing explains is ``unknown``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from tio_megatron.verify.diagnosis import elementwise_rules, faults
from tio_megatron.verify.diagnosis.attention_dropout import attention_dropout
from tio_megatron.verify.diagnosis.attention_rules import attention_rules, heads_of, window
from tio_megatron.verify.diagnosis.by_rules import by_rules, framework, missing_inputs, not_an_order, same_formula
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.combine import combine
from tio_megatron.verify.diagnosis.cures import CURES, LOOK
from tio_megatron.verify.diagnosis.expert_rows import lost_or_moved
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.head_rules import counted_rows, head_rules, targets_of
from tio_megatron.verify.diagnosis.mask_solved import solved
from tio_megatron.verify.diagnosis.of_products import product
from tio_megatron.verify.diagnosis.orders_of import order_finding
from tio_megatron.verify.diagnosis.parameters import differing, explain_parameter
from tio_megatron.verify.diagnosis.rope_rules import rope_rules
from tio_megatron.verify.diagnosis.rounding import looks_like_rounding, too_large_alone
from tio_megatron.verify.diagnosis.router_rules import flips, routing_rules
from tio_megatron.verify.diagnosis.rules import Rule, explain, relative
from tio_megatron.verify.diagnosis.sizes import misfit

_AGREEING = 16
"""Rows equal on both sides that a rule of the head must give too."""


def why(case: Case) -> Finding:
    """The cause of the first difference, with its evidence; ``unknown`` where none is known."""
    wrong = differing(case.a, case.b, case.parameters)
    if wrong:
        parameter = explain_parameter(case.a, case.b, wrong[0])
        return parameter.noting(f"{len(wrong)} of the parameters used here differ: {', '.join(wrong[:4])}") if len(wrong) > 1 else parameter
    for check in (faults.unwritten, misfit, lost_or_moved):
        if found := check(case):
            return found
    if case.point.op == "given":
        return _positions(case)
    if case.point.op == "top_k":
        return _choice(case)
    if not case.kept:
        return _without_tensors(case)
    for check in (faults.dropout, faults.other_type):
        if found := check(case):
            return found
    reasons: dict[str, Callable[[Case], Finding | None]] = {
        "product": product,
        "expert_product": product,
        "attention": _attention,
        "logprob": _head,
        "combine": combine,
    }
    rules: dict[str, Callable[[Case], Iterable[Rule]]] = {
        "norm": elementwise_rules.norm_rules,
        "rope": rope_rules,
        "swiglu": elementwise_rules.swiglu_rules,
        "add": elementwise_rules.add_rules,
        "embedding": elementwise_rules.embedding_rules,
        "routing": routing_rules,
        "scaling": elementwise_rules.scaling_rules,
    }
    reason: Finding | None = None
    if case.point.op in reasons:
        reason = reasons[case.point.op](case)
    elif case.point.op in rules:
        reason = by_rules(case, rules[case.point.op](case))
    return reason or faults.rounded_result(case) or faults.garbage(case) or faults.constant(case) or _unexplained(case)


def _attention(case: Case) -> Finding | None:
    heads = heads_of(case)
    if heads is None:
        return missing_inputs(case)
    a, b = (side[heads.rows] for side in case.sides)
    explained = explain(attention_rules(case, heads), a, b)
    assert explained is not None
    if explained.axes:
        found = framework(case, explained)
        if "visible" in explained.axes and "the whole pack" in (found.details["a"], found.details["b"]):
            side = "A" if found.details["a"] == "the whole pack" else "B"
            return replace(found, cause="packing", side=side, side_reason="", cure=CURES["packing"])
        return found
    dtype = min(case.dtypes, key=lambda kind: kind.itemsize)
    if looks_like_rounding(max(explained.a.error, explained.b.error), dtype) and not faults.constant(case) and not too_large_alone(case):
        if doubt := not_an_order(case, explained):
            return Finding("unknown", "", evidence=(*same_formula(explained), doubt), cure=LOOK)
        return order_finding(case, None, same_formula(explained))
    if keys := solved(case, heads):
        return Finding("framework", "mask", side=keys[1], evidence=tuple(keys[0]), cure=CURES["mask"])
    if moved := window(case, heads):
        cause, evidence, side = moved
        return Finding("framework" if cause else "unknown", cause, side=side, evidence=tuple(evidence), cure=CURES[cause or "visible"])
    return attention_dropout(case)


def _head(case: Case) -> Finding | None:
    if case.point.part == "logprob":
        case = replace(case, differs=case.differs & (targets_of(case) >= 0).numpy())
        if not case.differs.any():
            said = "only last tokens of sequences differ; no token follows them, so nothing is scored there"
            return Finding("unknown", "", evidence=(said,), cure="Compare the labels at the last token of each sequence: a mask must leave it out.")
    agreeing = replace(case, differs=case.compared & ~case.differs & (targets_of(case) >= 0).numpy())
    case.rows = torch.cat([case.rows, agreeing.rows[:_AGREEING]])  # a temperature and a filter move every row
    a, b = (side[case.rows] for side in case.sides)
    explained = explain(head_rules(case), a, b)
    if explained is None:
        return missing_inputs(case)
    if explained.axes:
        found = framework(case, explained)
        if found.cause == "temperature":
            return replace(found, details=found.details | {"temperature_a": float(found.details["a"]), "temperature_b": float(found.details["b"])})
        return found
    if counted := counted_rows(case):
        evidence, side = counted
        return Finding("framework", "vocab-padding", side=side, evidence=tuple(evidence), cure=CURES["vocab-padding"])
    worst = max(explained.a.error, explained.b.error)
    if looks_like_rounding(worst, min(case.dtypes, key=lambda kind: kind.itemsize)) and not too_large_alone(case):
        return order_finding(case, None, same_formula(explained))
    return None


def _positions(case: Case) -> Finding:
    rows = np.flatnonzero(case.differs)
    if case.kept:
        a, b = (side.reshape(len(side), -1)[:, 0].to(torch.int64) for side in case.sides)
        true = torch.tensor([case.a.where(int(row))[1] for row in rows])
        wrong = "B" if torch.equal(a[rows], true) else "A" if torch.equal(b[rows], true) else ""
        said = (
            f"token {case.a.where(int(rows[0]))[1]} of sequence {case.a.where(int(rows[0]))[0]} has position {int(a[rows[0]])} in A and {int(b[rows[0]])} in B"
        )
        return Finding("framework", "positions", side=wrong, evidence=(said,), cure=CURES["positions"])
    return Finding("framework", "positions", evidence=(f"{len(rows)} tokens have other positions",), cure=CURES["positions"])


def _choice(case: Case) -> Finding:
    assert case.point.layer is not None
    logits = f"layers.{case.point.layer}.router_logits"
    rows = np.flatnonzero(case.differs)
    if logits not in case.a.recorded or logits not in case.b.recorded:
        return Finding("unknown", "", evidence=("router logits were not recorded on both sides: a tie, or another rule of choosing",), cure="Record them.")
    found = flips(case.a, case.b, case.point.layer, rows)
    if found is None:
        said = "the router's logits are equal and the experts are not: a tie broken differently, or another rule of choosing; keep the tensors to tell"
        return Finding("routing", "", evidence=(said,), cure="Record again with --keep.")
    return Finding("routing", found[0], side=found[2], evidence=tuple(found[1]), cure=CURES[found[0]])


def _without_tensors(case: Case) -> Finding:
    rows = np.flatnonzero(case.differs)
    x, y = (side.squares(case.point.name)[rows].astype(np.float64) for side in (case.a, case.b))
    real = np.isfinite(x) & np.isfinite(y)
    gap = float(np.median(np.abs(x - y)[real] / np.maximum(x[real], 1e-30))) if real.any() else float("inf")
    said = f"only digests were recorded; the rows' sums of squares differ by {gap:.2g} (median): " + (
        "as rounding does" if gap < 1e-2 else "more than rounding does"
    )
    temperatures = [side.facts.get("temperature") for side in (case.a, case.b)]
    if case.point.op == "logprob" and None not in temperatures and temperatures[0] != temperatures[1]:
        text = f"equal logits; the sides state the temperatures {temperatures[0]} and {temperatures[1]}"
        off = [label for label, value in zip("AB", temperatures, strict=True) if value != 1.0]
        side, reason = (off[0], "") if len(off) == 1 else ("", "both sides state a temperature other than 1")
        return Finding("framework", "temperature", side=side, side_reason=reason, evidence=(text,), cure=CURES["temperature"])
    return Finding(
        "unknown", "", evidence=(said,), cure=f"Record both sides again with --keep {case.point.name} and its inputs, or --keep all on fewer tokens."
    )


def _unexplained(case: Case) -> Finding:
    a, b = (side[case.rows] for side in case.sides)
    said = f"equal inputs; the outputs differ by {relative(a, b):.2g}, and no known rule or order gives them"
    few = too_large_alone(case)
    if few:
        said += f"; {few}"
    training = [bool(side.facts.get("training")) for side in (case.a, case.b)]
    if training[0] != training[1]:
        side = "A" if training[0] else "B"
        return Finding("framework", "dropout", side=side, evidence=(said, f"{side} runs in training mode"), cure=CURES["dropout"])
    return Finding("unknown", "", evidence=(said,), cure=LOOK)
