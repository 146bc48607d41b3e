"""Matrix products: the terms of some output elements, and rules for their operands. Legend: e elements, K length of the sum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rules import Rule, rounded

MOST_COLUMNS = 24
MOST_ROWS = 24


@dataclass(frozen=True)
class Product:
    """Output elements chosen to be looked at: rows times columns, some that differ among them.

    ``x`` [r, K] and ``w`` [r, c, K] operands in fp64, ``a`` and ``b`` [r, c] as recorded, ``rows`` [r] rows of the trace, ``columns`` [r, c] output columns of
    ``width``, ``parameters`` the HF names in use, ``names`` [r] that of each row where rows have parameters of their own.
    """

    x: torch.Tensor
    w: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    width: int
    parameters: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def terms(self) -> torch.Tensor:
        """[r, c, K] fp64; exact for bf16 operands."""
        return self.x[:, None, :] * self.w

    def exact(self) -> torch.Tensor:
        """[r, c] fp64."""
        return torch.einsum("rk,rck->rc", self.x, self.w)


def product_of(case: Case) -> Product | None:
    """From recorded tensors, or None where they were not kept. Rows of experts are (token, expert) pairs."""
    if case.point.op == "expert_product":
        return _expert_product(case)
    x, w = case.input(case.point.parents[0]), case.weight(case.point.weights[0])
    if x is None or w is None or not case.kept:
        return None
    a, b = case.sides
    rows = case.rows[torch.linspace(0, len(case.rows) - 1, min(MOST_ROWS, len(case.rows))).round().to(torch.int64).unique()]
    x, a, b = (tensor[rows].reshape(len(rows), -1) for tensor in (x, a, b))
    if w.shape != (a.shape[1], x.shape[1]):
        return None
    columns = _columns(a, b)
    w = w[columns].to(torch.float64)
    return Product(
        x.to(torch.float64),
        w.expand(len(rows), *w.shape),
        a[:, columns],
        b[:, columns],
        rows,
        columns.expand(len(rows), -1),
        a.shape[1],
        (case.point.weights[0],),
    )


def _columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Columns where most rows differ, and some others."""
    order = (a != b).sum(0).argsort(descending=True, stable=True)
    some = torch.linspace(0, a.shape[1] - 1, MOST_COLUMNS // 3).round().to(torch.int64)
    return torch.cat([order[: MOST_COLUMNS - len(some)], some]).unique()


def pairs_of(case: Case) -> torch.Tensor:
    """[p, 2] (row, slot) of expert rows that differ."""
    a, b = case.sides
    differs = (a[case.rows] != b[case.rows]).flatten(2).any(-1)
    found = differs.nonzero()
    return torch.stack([case.rows[found[:, 0]], found[:, 1]], dim=1)


def _expert_product(case: Case) -> Product | None:
    x, ids = case.input(case.point.parents[0]), case.parent("expert_ids")
    if x is None or ids is None or not case.kept:
        return None
    a, b = case.sides
    pairs = pairs_of(case)
    pairs = pairs[torch.linspace(0, len(pairs) - 1, min(MOST_ROWS, len(pairs))).round().to(torch.int64).unique()] if len(pairs) else pairs
    if not len(pairs):
        return None
    rows, slots = pairs[:, 0], pairs[:, 1]
    a, b = a[rows, slots], b[rows, slots]
    columns = _columns(a, b)
    x = x[rows, slots] if x.dim() == 3 else x[rows]
    experts = ids[rows, slots].tolist()
    weights = {}
    for expert in set(experts):
        found = case.weight(case.point.weights[0].replace("*", str(expert)))
        if found is None or found.shape != (a.shape[1], x.shape[1]):
            return None
        weights[expert] = found[columns].to(torch.float64)
    w = torch.stack([weights[expert] for expert in experts])
    names = tuple(case.point.weights[0].replace("*", str(expert)) for expert in sorted(set(experts)))
    each = tuple(case.point.weights[0].replace("*", str(expert)) for expert in experts)
    return Product(x.to(torch.float64), w, a[:, columns], b[:, columns], rows, columns.expand(len(rows), -1), int(case.sides[0].shape[2]), names, each)


def product_rules(case: Case, made: Product) -> Iterator[Rule]:
    """Axes: types of the operands and of the result."""

    def rule(what: str, x: torch.dtype | None = None, w: torch.dtype | None = None, out: torch.dtype | None = None) -> Rule:
        def compute() -> torch.Tensor:
            left = made.x if x is None else rounded(made.x, x)
            right = made.w if w is None else rounded(made.w, w)
            y = torch.einsum("rk,rck->rc", left, right)
            return y if out is None else rounded(y, out)

        return Rule({"dtype": what}, compute)

    yield rule("as recorded")
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8 (e4m3)"}.get(dtype, "fp8 (e5m2)")
        yield rule(f"weight to {name}", w=dtype)
        yield rule(f"input to {name}", x=dtype)
        yield rule(f"weight and input to {name}", x=dtype, w=dtype)
        yield rule(f"result to {name}", out=dtype)
        yield rule(f"weight, input and result to {name}", x=dtype, w=dtype, out=dtype)
    if case.point.part == "router_logits":
        yield rule("weight, input and result to bf16", x=torch.bfloat16, w=torch.bfloat16, out=torch.bfloat16)


def other_parameters(case: Case, made: Product, side: str, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(what, result [r, c]) of the product with a wrong parameter in place of the recorded one ``name``."""
    weight = case.weight(name)
    if weight is None:
        return
    if case.point.op == "expert_product":
        twin = {"gate": "up", "up": "gate"}.get(case.point.part.removeprefix("expert_"))
        if twin:
            yield f"the {twin} projections of the same experts", _of_twin(case, made, twin)
        return
    columns = made.columns[0]
    if weight.shape[0] == weight.shape[1]:
        yield "transposed", made.x @ weight.to(torch.float64).t()[columns].t()
    half = weight.shape[0] // 2
    if weight.shape[0] % 2 == 0:
        yield "halves swapped", made.x @ weight.roll(half, 0)[columns].to(torch.float64).t()
    for other in sorted(set(case.a.weights) | set(case.b.weights)):
        if (
            other != name
            and re.sub(r"\d+", "", other).split(".")[-3:-1]
            and case.a.weights.get(other, case.b.weights.get(other, {})).get("shape") == list(weight.shape)
        ):
            found = case.weight(other)
            if found is not None:
                yield f"the parameter {other}", made.x @ found[columns].to(torch.float64).t()


def _of_twin(case: Case, made: Product, twin: str) -> torch.Tensor:
    """[r, c] the rows of ``made`` with the gate projections for the up projections, or the other way round; NaN where they were not kept."""
    out = torch.full(made.a.shape, float("nan"), dtype=torch.float64)
    start, _, end = case.point.weights[0].partition("*")
    theirs = case.graph[f"layers.{case.point.layer}.expert_{twin}"].weights[0]
    for i, name in enumerate(made.names):
        weight = case.weight(theirs.replace("*", name.removeprefix(start).removesuffix(end)))
        if weight is not None and weight.shape[1] == made.x.shape[1]:
            out[i] = weight[made.columns[i]].to(torch.float64) @ made.x[i]
    return out
