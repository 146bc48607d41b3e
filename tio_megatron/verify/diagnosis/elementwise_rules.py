"""Rules of norms, activation, residual sum and embedding. Legend: r rows of the case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rules import Rule, rounded

_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12)
_VARIANCE = ("variance itself to bf16", "variance itself to bf16, before the weight")
_STEPS = ("every step", "every step, weight first")
_SQUARES = ("squares alone", "squares alone, before the weight")


def low(case: Case) -> torch.dtype:
    """The narrower type of the point on both sides (the one roundings go to)."""
    return min(case.dtypes, key=lambda dtype: dtype.itemsize)


def norm_rules(case: Case) -> Iterator[Rule]:
    """Axes: where the weight is multiplied, what the variance is taken of, epsilon, the weight's form, the mean."""
    name, weight = case.point.parents[0], case.weight(case.point.weights[0])
    x = case.input(name)
    if x is None or weight is None:
        return
    width = weight.numel()
    dtype, x = low(case), x[case.rows].to(torch.float64)
    shape = x.shape
    w = weight.to(torch.float64)
    source = {"sum": x.reshape(-1, width)}
    made = case.graph.get(name)
    if made is not None and made.op == "add":
        terms = [case.input(parent) for parent in made.parents]
        if terms[0] is not None and terms[1] is not None:
            source["unrounded sum"] = sum((term[case.rows].to(torch.float64) for term in terms if term is not None), torch.zeros(())).reshape(-1, width)

    def rule(
        cast: str = "after the weight", of: str = "sum", value: str = "", eps: float | None = None, form: str = "weight", mean: str = "root mean square"
    ) -> Rule:
        value, eps_ = value or of, eps if eps is not None else float(case.fact("norm_eps", 1e-6)[0])

        def compute() -> torch.Tensor:
            var, v = source[of], source[value]
            if mean != "root mean square":
                var, v = var - var.mean(-1, keepdim=True), v - v.mean(-1, keepdim=True)
            squares = var.square()
            if cast in ("variance too", *_STEPS, *_SQUARES):
                squares = rounded(squares, dtype)
            mean_square = squares.mean(-1, keepdim=True)
            if cast.startswith("every step"):
                v = rounded(v, dtype)
                mean_square = rounded(rounded(mean_square, dtype) + eps_, dtype) - eps_
            if cast in _VARIANCE:
                mean_square = rounded(mean_square, torch.bfloat16)
            r = (mean_square + eps_).rsqrt().to(torch.float32).to(torch.float64)
            scale = {"weight": w, "1 + weight": 1 + w, "none": torch.ones_like(w)}[form]
            if cast in ("after the weight", _VARIANCE[0], _SQUARES[0]):
                out = (v * r).to(torch.float32).to(torch.float64) * scale
            elif cast in ("before the weight", _VARIANCE[1], _SQUARES[1]):
                out = rounded(v * r, dtype) * scale
            elif cast == "weight first":
                out = rounded(v * scale, dtype) * r
            elif cast in _STEPS:
                first, last = (scale, 1.0) if cast == _STEPS[1] else (1.0, scale)
                roots = [rounded(root, dtype) for root in (r, 1 / rounded((mean_square + eps_).sqrt(), dtype))]  # torch takes either, by the row's place
                outs = [rounded(rounded(v * first, dtype) * root, dtype) * last for root in roots]
                far = [torch.stack([(out.reshape(shape) - side[case.rows]).abs().reshape(out.shape).sum(-1) for side in case.sides]).amin(0) for out in outs]
                out = torch.where((far[0] <= far[1])[:, None], outs[0], outs[1])
            else:
                out = rounded(v * rounded(r, dtype), dtype) * scale
            return out.reshape(shape)

        axes = {
            "norm-cast": cast,
            "residual-rounding": f"variance of {of}, value of {value}",
            "norm-epsilon": f"{eps_:g}",
            "norm-weight": form,
            "norm-mean": mean,
        }
        return Rule(axes, compute)

    yield rule()
    yield rule("before the weight")
    if "unrounded sum" in source:
        for cast in ("after the weight", "before the weight"):
            yield rule(cast, "unrounded sum")
            yield rule(cast, "unrounded sum", "sum")
            yield rule(cast, "sum", "unrounded sum")
    for cast in ("low precision", "variance too", "weight first", *_STEPS, *_VARIANCE, *_SQUARES):
        yield rule(cast)
    fitted = [_epsilon(side[case.rows].to(torch.float64).reshape(-1, width), source["sum"], w) for side in case.sides]
    nice = [float(f"{eps:.{digits}e}") for digits in (0, 1, 3) for eps in fitted if eps > 0]
    for eps in dict.fromkeys([*map(float, case.fact("norm_eps")), *_EPSILONS, *nice]):
        yield rule(eps=eps)
        yield rule("before the weight", eps=eps)
        if "unrounded sum" in source and eps in nice:  # a fused add and norm, with another epsilon
            for cast in ("after the weight", "before the weight"):
                for of, value in (("unrounded sum", "unrounded sum"), ("unrounded sum", "sum"), ("sum", "unrounded sum")):
                    yield rule(cast, of, value, eps)
    for cast in ("after the weight", "before the weight"):
        yield rule(cast, form="1 + weight")
        yield rule(cast, form="none")
        yield rule(cast, mean="mean subtracted")


def _epsilon(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """The epsilon that gives ``out`` [n, width] from ``x``; 0 if it cannot be told from rounding.

    Rows of small variance tell it best: the error of a row's estimate grows with its variance, so each counts by the inverse square of it.
    """
    weighted = x * w
    r = (out * weighted).sum(-1) / weighted.square().sum(-1).clamp_min(1e-30)
    variance = x.square().mean(-1)
    estimates, counts = 1 / r.square() - variance, 1 / variance.clamp_min(1e-12).square()
    real = estimates.isfinite()
    if not bool(real.any()):
        return 0.0
    found = float((estimates[real] * counts[real]).sum() / counts[real].sum())
    return found if math.isfinite(found) and 1e-13 < found < 1e3 else 0.0


def swiglu_rules(case: Case) -> Iterator[Rule]:
    """Axes: roundings between the steps, the activation function, which half is gated."""
    pair = [case.input(parent) for parent in case.point.parents]
    if pair[0] is None or pair[1] is None:
        return
    dtype = low(case)
    gate, up = (half[case.rows].to(torch.float32) for half in pair if half is not None)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "squared relu": lambda x: F.relu(x).square(),
        "sigmoid": torch.sigmoid,
    }

    def rule(rounding: str, function: str = "silu", swapped: bool = False, narrow: torch.dtype = dtype) -> Rule:
        def compute() -> torch.Tensor:
            x, y = (up, gate) if swapped else (gate, up)
            wide = functions[function](x.to(torch.float64))
            if rounding == "after the activation":
                wide = rounded(wide, narrow)
            elif rounding == "sigmoid too":
                wide = rounded(x.to(torch.float64) * rounded(torch.sigmoid(x.to(torch.float64)), narrow), narrow)
            out = wide * y.to(torch.float64)
            return rounded(out, narrow) if rounding == "product" else out

        name = rounding if rounding == "none" else f"{rounding}, to {str(narrow).removeprefix('torch.')}"
        return Rule({"extra-rounding": name, "activation": function, "gate-up-swapped": str(swapped)}, compute)

    yield rule("none")
    for narrow in (torch.bfloat16, torch.float16):
        yield rule("after the activation", narrow=narrow)
        yield rule("sigmoid too", narrow=narrow)
        if narrow != dtype:
            yield rule("product", narrow=narrow)
    others: list[dict[str, Any]] = [{"function": name} for name in list(functions)[1:]] + [{"swapped": True}]
    for other in others:
        yield rule("none", **other)
        if dtype != torch.float32:
            yield rule("after the activation", **other)


def scaling_rules(case: Case) -> Iterator[Rule]:
    """Axes: roundings of a row of an expert that is multiplied by its probability before the down projection."""
    act, probabilities = (case.input(parent) for parent in case.point.parents)
    if act is None or probabilities is None:
        return
    x, p = act[case.rows].to(torch.float64), probabilities[case.rows].to(torch.float64)[..., None]
    yield Rule({"extra-rounding": "none"}, lambda: x * p)
    yield Rule({"extra-rounding": "probabilities to bf16"}, lambda: x * rounded(p, torch.bfloat16))
    yield Rule({"extra-rounding": "row to bf16"}, lambda: rounded(x, torch.bfloat16) * p)


def add_rules(case: Case) -> Iterator[Rule]:
    """Axes: which terms are added, and in which precision."""
    terms = [case.input(parent) for parent in case.point.parents]
    if terms[0] is None or terms[1] is None:
        return
    x, y = (term[case.rows].to(torch.float64) for term in terms if term is not None)
    for name, out in (("both", x + y), ("the stream alone", x), ("the branch alone", y), ("the branch twice", x + 2 * y), ("the stream twice", 2 * x + y)):
        yield Rule({"residual-terms": name, "extra-rounding": "none"}, lambda out=out: out)  # type: ignore[misc]
    normed = case.input(f"layers.{case.point.layer}.{'attn_norm' if case.point.part == 'attn_residual' else 'mlp_norm'}")
    if normed is not None and normed.shape == terms[0].shape:  # Megatron's apply_residual_connection_post_layernorm
        from_norm = normed[case.rows].to(torch.float64).reshape(x.shape) + y
        yield Rule({"residual-terms": "the normed stream and the branch", "extra-rounding": "none"}, lambda: from_norm)
    for kind in (torch.bfloat16, torch.float16):
        to = "bf16" if kind == torch.bfloat16 else "fp16"
        yield Rule({"residual-terms": "both", "extra-rounding": f"sum to {to}"}, lambda kind=kind: rounded(x + y, kind))  # type: ignore[misc]
        yield Rule({"residual-terms": "both", "extra-rounding": f"branch to {to}"}, lambda kind=kind: x + rounded(y, kind))  # type: ignore[misc]
        yield Rule({"residual-terms": "both", "extra-rounding": f"stream to {to}"}, lambda kind=kind: rounded(x, kind) + y)  # type: ignore[misc]


def embedding_rules(case: Case) -> Iterator[Rule]:
    """Axes: scale, and which row of the table a token takes: found by its bytes where a side holds rows of the table."""
    weight = case.weight(case.point.weights[0])
    if weight is None:
        return
    tokens = torch.from_numpy(case.a.tokens)
    rows = case.rows
    table = weight.to(torch.float64)
    width = table.shape[1]
    shifted = {"its own": tokens[rows], "the token before": tokens.roll(1)[rows], "the token after": tokens.roll(-1)[rows]}
    for side in case.sides:
        taken = _taken(side[rows], weight.to(side.dtype))
        if taken is not None and not torch.equal(taken, tokens[rows]):
            shifted.setdefault(_ids_in_words(taken, tokens[rows], len(table)), taken)
    for name, ids in shifted.items():
        yield Rule({"embedding-row": name, "scale": "1"}, lambda ids=ids: table[ids])  # type: ignore[misc]
    yield Rule({"embedding-row": "its own", "scale": "square root of the width"}, lambda: table[tokens[rows]] * math.sqrt(width))


def _taken(out: torch.Tensor, table: torch.Tensor) -> torch.Tensor | None:
    """[r]: the row of ``table`` that each row of ``out`` is, byte for byte; None where one of them is none, or all are the same zeros."""
    found = []
    for row in out.reshape(len(out), -1):
        same = (table == row).all(-1).nonzero()
        if not len(same):
            return None
        found.append(int(same[0]))
    return torch.tensor(found) if bool((out != 0).any()) else None


def _ids_in_words(taken: torch.Tensor, own: torch.Tensor, vocab: int) -> str:
    shift = ((taken - own) % vocab).unique()
    if len(shift) == 1:
        by = int(shift) if int(shift) <= vocab // 2 else int(shift) - vocab
        return f"of its id {'+' if by > 0 else '-'} {abs(by)}"
    if len(taken.unique()) == 1 and len(taken) > 1:
        return f"row {int(taken[0])} for all of these tokens"
    return f"others: row {int(taken[0])} for id {int(own[0])}"
