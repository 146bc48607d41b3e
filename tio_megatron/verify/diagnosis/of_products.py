"""Matrix products that differ: types of the operands, orders of the sum, or a parameter that is not the one held."""

from __future__ import annotations

from dataclasses import replace

import torch

from tio_megatron.verify.diagnosis import faults
from tio_megatron.verify.diagnosis.by_rules import framework, missing_inputs, same_formula
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES, LOOK
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.held import not_other_weights, rows_of
from tio_megatron.verify.diagnosis.orders_of import order_finding, product_order
from tio_megatron.verify.diagnosis.products import Product, other_parameters, product_of, product_rules
from tio_megatron.verify.diagnosis.rounding import in_its_type, sum_rounding, too_large_alone
from tio_megatron.verify.diagnosis.rules import explain, relative


def product(case: Case) -> Finding | None:
    """The finding of a product (of experts too); None where nothing known explains it."""
    made = product_of(case)
    if made is None:
        return missing_inputs(case)
    explained = explain(product_rules(case, made), made.a, made.b)
    assert explained is not None
    if explained.axes:
        return framework(case, explained)
    made = replace(made, a=in_its_type(made.a), b=in_its_type(made.b))
    errors = relative(made.exact().to(made.a.dtype), made.a), relative(made.exact().to(made.b.dtype), made.b)
    limits = [sum_rounding(made.terms, side.dtype) for side in (made.a, made.b)]
    narrow = any(error > limit for error, limit in zip(errors, limits, strict=True))
    orders = product_order(case, made, narrow)
    if all(each.name for each in orders):
        said = same_formula(explained) if not narrow else [f"relative to the exact result A is off by {errors[0]:.2g}, B by {errors[1]:.2g}"]
        return order_finding(case, orders, said)
    if narrow:
        return _not_its_weights(case, made, errors, limits)
    if faults.garbage(case) or faults.constant(case) or too_large_alone(case):
        return None
    return order_finding(case, orders, same_formula(explained))


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
    said = f"the parameter is the same on both sides; A's rows follow from it and their inputs within {errors[0]:.2g}, B's within {errors[1]:.2g}"
    few = too_large_alone(case)
    reason, cure = (few, LOOK) if few else not_other_weights(rows_of(case, made, side), out.dtype)
    if reason:
        why = f"{side} is off by more than rounding ({max(limits):.2g}), and not as by an old copy of the weights: {reason}"
        return Finding("unknown", "", evidence=(said, why), cure=cure)
    if not any(right):
        return Finding("unknown", "", evidence=(said, f"rounding explains {max(limits):.2g} at most"), cure=LOOK)
    return Finding(
        "weights", "stale-copy", parameter=name, side=side, evidence=(said, f"{side} computes with other numbers than it holds"), cure=CURES["stale-copy"]
    )
