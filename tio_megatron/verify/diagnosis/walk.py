"""``diagnose``: walks two traces in the order of computation, stops at the first point that differs, and asks why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from tio_megatron.verify.diagnosis import elementwise_rules, faults
from tio_megatron.verify.diagnosis.attention_rules import attention_rules, heads_of, window
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.combine import combine, combined_from
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.head_rules import counted_rows, head_rules, targets_of
from tio_megatron.verify.diagnosis.held import not_other_weights, rows_of
from tio_megatron.verify.diagnosis.orders_of import order_finding, product_order
from tio_megatron.verify.diagnosis.parameters import differing, explain_parameter
from tio_megatron.verify.diagnosis.products import Product, other_parameters, product_of, product_rules
from tio_megatron.verify.diagnosis.rounding import in_its_type, looks_like_rounding, sum_rounding, too_large_alone
from tio_megatron.verify.diagnosis.router_rules import flips, routing_rules
from tio_megatron.verify.diagnosis.rules import Explained, Rule, explain, relative
from tio_megatron.verify.diagnosis.sides import departing, with_reason
from tio_megatron.verify.diagnosis.unfinished import stopped
from tio_megatron.verify.diagnosis.unseen import one_sided
from tio_megatron.verify.traces.reader import Trace, Unfinished

_RENAMED = {"visible": "mask"}
"""Axes whose name is not the cause's."""
_RECORD_AGAIN = "Record that side again: its trace is damaged (a full disk, a copy cut short), or its recorder lost tokens."
_LOOK = "Compare this operator's code on both sides: inputs and parameters are equal."


def diagnose(a: Trace | Unfinished, b: Trace | Unfinished) -> Finding:
    """The first difference between two traces, and its cause.

    Raises:
        ValueError: they are about different tokens or differently built models, so that nothing can be compared.
    """
    if isinstance(a, Unfinished) or isinstance(b, Unfinished):
        return with_reason(stopped(a, b))
    _require_comparable(a, b)
    return with_reason(_walk(a, b))


def _walk(a: Trace, b: Trace) -> Finding:
    graph = a.graph + [point for point in b.graph if point.name not in {known.name for known in a.graph}]
    compared = rows_compared = rows_recorded = 0
    for point in graph:
        if point.name not in a.recorded or point.name not in b.recorded:
            continue
        shapes = [side.recorded[point.name]["shape"] for side in (a, b)]
        columns = (a.columns(point.name), b.columns(point.name))
        both = (columns[0] > 0) & (columns[1] > 0)
        compared += bool(both.any())
        rows_compared += int(both.sum())
        rows_recorded += int(((columns[0] > 0) | (columns[1] > 0)).sum())
        if shapes[0] != shapes[1]:
            if both.any():
                text = f"rows of {shapes[0]} in A and of {shapes[1]} in B"
                return Finding("framework", "shape", point.name, point.layer, int(both.sum()), compared, evidence=(text,), cure=CURES["shape"])
            continue
        differs = both & ((a.digests(point.name) != b.digests(point.name)) | (columns[0] != columns[1]))
        if differs.any():
            case = Case(a, b, point, differs, both, {known.name: known for known in graph})
            found = _why(case)
            rows = np.flatnonzero(differs)
            noted = _notes(case)
            found = replace(found, point=point.name, layer=point.layer, rows=len(rows), compared=compared, first=a.where(int(rows[0])), routing=_routing(a, b))
            return found.noting(*noted)
    gaps = one_sided(a, b, graph)
    unused = differing(a, b, sorted(a.weights.keys() | b.weights.keys()))
    if unused:
        found = replace(explain_parameter(a, b, unused[0]), compared=compared)
        return found.noting(f"{len(unused)} parameters differ, but no recorded point does: no token used them")
    counted = f"compared: {rows_compared} of {rows_recorded} rows (tokens at points) that either side recorded at these points"
    evidence = (*([counted] if compared else []), *gaps[:4])
    return Finding("equal", compared=compared, one_sided=len(gaps), evidence=evidence, cure=_RECORD_AGAIN if gaps else "")


def _require_comparable(a: Trace, b: Trace) -> None:
    if len(a.lengths) != len(b.lengths):
        raise ValueError(f"the traces are about different tokens: {len(a.lengths)} sequences in A, {len(b.lengths)} in B")
    for index, (x, y) in enumerate(zip(a.lengths, b.lengths, strict=True)):
        if x != y:
            raise ValueError(f"the traces are about different tokens: sequence {index} has {x} in A and {y} in B")
    if (a.tokens != b.tokens).any():
        row = int(np.argmax(a.tokens != b.tokens))
        sequence, position = a.where(row)
        raise ValueError(f"the traces are about different tokens: token {position} of sequence {sequence} is {a.tokens[row]} in A and {b.tokens[row]} in B")
    for name in ("layers", "moe", "hidden", "head_dim", "experts", "top_k"):
        sizes = a.shape.get(name), b.shape.get(name)
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(f"the traces are of different models: {name} is {sizes[0]} in A and {sizes[1]} in B")


def _why(case: Case) -> Finding:
    wrong = differing(case.a, case.b, case.parameters)
    if wrong:
        parameter = explain_parameter(case.a, case.b, wrong[0])
        return parameter.noting(f"{len(wrong)} of the parameters used here differ: {', '.join(wrong[:4])}") if len(wrong) > 1 else parameter
    for check in (faults.unwritten, faults.lost_or_moved):
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
        "product": _product,
        "expert_product": _product,
        "attention": _attention,
        "logprob": _head,
        "combine": combine,
    }
    rules: dict[str, Callable[[Case], Iterable[Rule]]] = {
        "norm": elementwise_rules.norm_rules,
        "rope": elementwise_rules.rope_rules,
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
        reason = _by_rules(case, rules[case.point.op](case))
    return reason or faults.rounded_result(case) or faults.garbage(case) or faults.constant(case) or _unexplained(case)


def _by_rules(case: Case, rules: Iterable[Rule]) -> Finding | None:
    a, b = (side[case.rows] for side in case.sides)
    explained = explain(rules, a, b)
    if explained is None:
        return _missing_inputs(case)
    if explained.axes:
        return _framework(case, explained)
    dtype = max(case.dtypes, key=lambda dtype: -dtype.itemsize)
    worst = max(explained.a.error, explained.b.error)
    if faults.constant(case) or too_large_alone(case):
        return None
    summed = case.point.op not in ("rope", "swiglu", "add", "embedding", "scaling")
    if explained.gap <= 4 * worst + 1e-12 and looks_like_rounding(worst if summed else worst / 2, dtype):
        if not summed:  # so there is no order
            said = (*_same_formula(explained), "nothing is summed at this point, so one side rounds where the other does not, or uses another exp, cos or fma")
            return Finding("framework", "extra-rounding", evidence=said, cure=CURES["extra-rounding"])
        return order_finding(case, None, _same_formula(explained))
    return None


def _framework(case: Case, explained: Explained) -> Finding:
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


def _same_formula(explained: Explained) -> list[str]:
    return [f"equal inputs, one formula for both, computed anew from them: {_errors(explained)}"]


def _product(case: Case) -> Finding | None:
    made = product_of(case)
    if made is None:
        return _missing_inputs(case)
    explained = explain(product_rules(case, made), made.a, made.b)
    assert explained is not None
    if explained.axes:
        return _framework(case, explained)
    made = replace(made, a=in_its_type(made.a), b=in_its_type(made.b))
    errors = relative(made.exact().to(made.a.dtype), made.a), relative(made.exact().to(made.b.dtype), made.b)
    limits = [sum_rounding(made.terms, side.dtype) for side in (made.a, made.b)]
    narrow = any(error > limit for error, limit in zip(errors, limits, strict=True))
    orders = product_order(case, made, narrow)
    if all(each.name for each in orders):
        said = _same_formula(explained) if not narrow else [f"relative to the exact result A is off by {errors[0]:.2g}, B by {errors[1]:.2g}"]
        return order_finding(case, orders, said)
    if narrow:
        return _not_its_weights(case, made, errors, limits)
    if faults.garbage(case) or faults.constant(case) or too_large_alone(case):
        return None
    return order_finding(case, orders, _same_formula(explained))


def _not_its_weights(case: Case, made: Product, errors: tuple[float, float], limits: list[float]) -> Finding | None:
    """A product that is off by more than rounding: with another parameter, with an old copy of its own, or for a reason that is not known."""
    if case.point.op == "product" and (found := faults.garbage(case)):
        return found
    side = "A" if errors[0] > errors[1] else "B"
    out = made.a if side == "A" else made.b
    name = made.parameters[0]
    right = [error <= limit for error, limit in zip(errors, limits, strict=True)]
    if any(right):
        for what, product in other_parameters(case, made, side, name):
            if relative(product.to(out.dtype), out) < min(0.05 * max(errors), 2 * limits["AB".index(side)]) or torch.equal(product.to(out.dtype), out):
                cause = {"transposed": "weights-transposed", "halves swapped": "weights-rows"}.get(what, "weights-moved")
                said = f"{side} computes the product with {what}, though it recorded the same parameter as the other side"
                return Finding("weights", cause, parameter=name, side=side, evidence=(said,), cure=CURES["stale-copy"])
    if simple := faults.constant(case) or faults.rounded_result(case):
        return simple
    if case.point.op == "product" and (other := _no_weight_does(case, made)):
        return other
    said = f"the parameter is the same on both sides; A's rows follow from it and their inputs within {errors[0]:.2g}, B's within {errors[1]:.2g}"
    if not any(right):
        return Finding("unknown", "", evidence=(said, f"rounding explains {max(limits):.2g} at most"), cure=_LOOK)
    reason = too_large_alone(case) or not_other_weights(rows_of(case, made, side), out.dtype)
    if reason:
        why = f"{side} is off by more than rounding ({max(limits):.2g}), and not as by an old copy of the weights: {reason}"
        return Finding("unknown", "", evidence=(said, why), cure=_LOOK)
    return Finding(
        "weights", "stale-copy", parameter=name, side=side, evidence=(said, f"{side} computes with other numbers than it holds"), cure=CURES["stale-copy"]
    )


def _no_weight_does(case: Case, made: Product) -> Finding | None:
    """Another weight changes every token, and each by its own inputs."""
    gap = (made.a.to(torch.float64) - made.b.to(torch.float64)).nan_to_num()
    size = float(gap.square().mean().sqrt())
    if len(gap) >= 4 and size > 0 and float((gap - gap.mean(0)).square().mean().sqrt()) < 0.1 * size:
        said = "the sides differ by the same numbers at every token, whatever its inputs are: one side adds a bias"
        return Finding("unknown", "", evidence=(said,), cure="Look for a bias of this product that the checkpoint has not, or that one side leaves out.")
    if 2 * case.differs.sum() < case.compared.sum():
        said = f"only {int(case.differs.sum())} of {int(case.compared.sum())} tokens differ, and by more than rounding; another weight would change all"
        return Finding("unknown", "", evidence=(said,), cure="Compare what this operator does with those tokens on both sides.")
    return None


def _attention(case: Case) -> Finding | None:
    heads = heads_of(case)
    if heads is None:
        return _missing_inputs(case)
    a, b = (side[heads.rows] for side in case.sides)
    explained = explain(attention_rules(case, heads), a, b)
    assert explained is not None
    if explained.axes:
        found = _framework(case, explained)
        if "visible" in explained.axes and "the whole pack" in (found.details["a"], found.details["b"]):
            side = "A" if found.details["a"] == "the whole pack" else "B"
            return replace(found, cause="packing", side=side, side_reason="", cure=CURES["packing"])
        return found
    dtype = min(case.dtypes, key=lambda kind: kind.itemsize)
    if looks_like_rounding(max(explained.a.error, explained.b.error), dtype) and not faults.constant(case) and not too_large_alone(case):
        return order_finding(case, None, _same_formula(explained))
    if moved := window(case, heads):
        cause, evidence, side = moved
        return Finding("framework", cause, side=side, evidence=tuple(evidence), cure=CURES[cause])
    return faults.attention_dropout(case)


def _head(case: Case) -> Finding | None:
    if case.point.part == "logprob":
        rows = case.rows[targets_of(case)[case.rows] >= 0]
        case.rows = rows  # the last token of a sequence has no target
    a, b = (side[case.rows] for side in case.sides)
    explained = explain(head_rules(case), a, b)
    if explained is None:
        return _missing_inputs(case)
    if explained.axes:
        found = _framework(case, explained)
        if found.cause == "temperature":
            return replace(found, details=found.details | {"temperature_a": float(found.details["a"]), "temperature_b": float(found.details["b"])})
        return found
    if counted := counted_rows(case):
        evidence, side = counted
        return Finding("framework", "vocab-padding", side=side, evidence=tuple(evidence), cure=CURES["vocab-padding"])
    worst = max(explained.a.error, explained.b.error)
    if looks_like_rounding(worst, min(case.dtypes, key=lambda kind: kind.itemsize)) and not too_large_alone(case):
        return order_finding(case, None, _same_formula(explained))
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


def _routing(a: Trace, b: Trace) -> tuple[str, ...]:
    said = []
    for layer in range(int(a.shape["layers"])):
        name = f"layers.{layer}.expert_ids"
        if name not in a.recorded or name not in b.recorded:
            continue
        both = (a.columns(name) > 0) & (b.columns(name) > 0)
        rows = np.flatnonzero(both & (a.digests(name) != b.digests(name)))
        if len(rows):
            found = flips(a, b, layer, rows[:256])
            said.append(
                found[1][0] + (f" ({found[0]}); {found[1][1]}" if found[1][1] else "") if found else f"layer {layer}: {len(rows)} tokens change experts"
            )
    return tuple(said[:8])


def _notes(case: Case) -> list[str]:
    said = []
    types = [side.recorded[case.point.name]["dtype"] for side in (case.a, case.b)]
    if types[0] != types[1]:
        said.append(f"recorded as {types[0]} in A and {types[1]} in B")
    for name in ("training", "temperature"):
        values = [side.facts.get(name) for side in (case.a, case.b)]
        if values[0] != values[1] and None not in values:
            said.append(f"{name}: {values[0]} in A, {values[1]} in B")
    parents = combined_from(case) if case.point.op == "combine" else [parent for parent in case.point.parents if parent != "positions"]
    missing = [parent for parent in parents if not (parent in case.a.recorded and parent in case.b.recorded)]
    if missing:
        said.append(f"not recorded on both sides, so the difference may begin there: {', '.join(missing)}")
    return said


def _missing_inputs(case: Case) -> Finding | None:
    return faults.garbage(case) or faults.constant(case) or faults.unknown_inputs(case)


def _without_tensors(case: Case) -> Finding:
    rows = np.flatnonzero(case.differs)
    x, y = (side.squares(case.point.name)[rows].astype(np.float64) for side in (case.a, case.b))
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = float(np.nanmedian(np.abs(x - y) / np.maximum(x, 1e-30)))
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
    return Finding("unknown", "", evidence=(said,), cure=_LOOK)
