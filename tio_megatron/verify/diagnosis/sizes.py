"""Rows of other sizes than their operator gives: of a recorder that is not one of ours, or of a damaged trace. No rule is tried on them."""

from __future__ import annotations

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.finding import Finding

_ALIKE = ("norm", "rope", "attention", "add", "swiglu", "scaling")
"""Operators whose rows have the size of their first input."""


def misfit(case: Case) -> Finding | None:
    """The finding where the sizes of the point, its inputs and its parameters do not belong together."""
    if not case.kept or all(_fits(case)):
        return None
    inputs = {name: list(rows.shape[1:]) for name in case.point.parents if (rows := case.input(name)) is not None}
    said = f"rows of {list(case.sides[0].shape[1:])} are not what this operator makes of its inputs {inputs or ''} and parameters: no rule could be tried"
    return Finding("unknown", "", evidence=(said,), cure="Record both sides with rows of the sizes that the recorders of this package give (reference.md).")


def _fits(case: Case) -> list[bool]:
    op, out, head = case.point.op, case.sides[0].shape[1:], int(case.a.shape.get("head_dim") or 1)
    inputs = [rows.shape[1:] if (rows := case.input(name)) is not None else None for name in case.point.parents]
    first, last = (inputs[0], inputs[-1]) if inputs else (None, None)
    ids = case.parent("expert_ids")
    tokens = int(case.a.tokens.max())
    found = []
    if op in _ALIKE and first is not None:
        found.append(first == out)
    if op in ("add", "swiglu") and last is not None:
        found.append(last == out)
    if op in ("norm", "embedding") and (weight := case.weight(case.point.weights[0])) is not None:
        found.append(out[0] % weight.numel() == 0 if op == "norm" else weight.dim() == 2 and out[0] == weight.shape[1] and tokens < len(weight))
    if op in ("rope", "attention"):
        found += [size is None or size[0] % head == 0 for size in inputs[: 1 if op == "rope" else 3]]
    if op == "attention" and first is not None and inputs[1] is not None:
        found += [first[0] % inputs[1][0] == 0, inputs[1] == last or last is None]
    if op == "scaling" and last is not None:
        found.append(last == out[:1])
    if op in ("routing", "expert_product", "combine") and ids is not None:
        slots = [rows.shape[1:2] for name in case.point.parents if (rows := case.input(name)) is not None and "router" not in name and "norm" not in name]
        found += [size == ids.shape[1:] for size in slots] + ([out[:1] == ids.shape[1:]] if op != "combine" else [])
        found.append(bool((ids >= 0).all()) and int(ids.max()) < int(case.a.shape.get("experts") or 1 << 62))
    if op == "combine":
        found += [rows.shape[2:] == out for name in case.point.parents if (rows := case.input(name)) is not None and rows.dim() == 3]
    if op == "routing" and first is not None and ids is not None:
        found.append(int(ids.max()) < first[0])
    if op == "logprob" and first is not None:
        found.append(first[0] > tokens if case.point.part == "logprob" and out == (1,) else first == out)
    return found
