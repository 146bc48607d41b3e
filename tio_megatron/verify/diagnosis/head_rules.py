"""The last step: log-probabilities from equal logits. Legend: r rows, V true vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rules import Rule, relative, rounded

_DTYPES = ("fp32", "logits to bf16", "result to bf16", "logits and result to bf16", "torch's log-softmax in bf16", "every step in bf16")
_AHEAD = {"the same": 0, "the one after the next": 2}


def targets_of(case: Case, ahead: int = 1) -> torch.Tensor:
    """[T] the token that stands ``ahead`` of each in the same sequence, -1 where there is none."""
    tokens = torch.from_numpy(case.a.tokens)
    stops = torch.from_numpy(np.repeat(np.cumsum(case.a.lengths), case.a.lengths))
    return tokens.roll(-ahead).masked_fill(torch.arange(len(tokens)) + ahead >= stops, -1)


def _of(case: Case, rows: torch.Tensor, table: torch.Tensor, ahead: int = 1) -> torch.Tensor:
    """What the point holds of the log-probabilities [r, V]: all, or those of the targets, NaN where there is none."""
    if case.point.part == "logprob_rows":
        return table
    targets = targets_of(case, ahead)[rows][:, None]
    return table.gather(1, targets.clamp_min(0)).masked_fill(targets < 0, float("nan"))


def temperature_of(case: Case, rows: torch.Tensor, logits: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    """(temperature that explains ``out`` best, its error), by a search from 1/30 to 30."""
    low, high = -3.4, 3.4
    best = (1.0, float("inf"))
    for _ in range(6):
        grid = torch.linspace(low, high, 25, dtype=torch.float64)
        for exponent in grid.tolist():
            t = float(np.exp(exponent))
            error = relative(_of(case, rows, (logits / t).log_softmax(-1)), out)
            if error < best[1]:
                best = (t, error)
        step = (high - low) / 24
        low, high = float(np.log(best[0])) - step, float(np.log(best[0])) + step
    nice = round(best[0], 3)
    return (nice, best[1]) if abs(nice - best[0]) < 1e-3 * best[0] + 5e-4 else best


def head_rules(case: Case) -> Iterator[Rule]:
    """Axes: temperature, rows counted, types, which token's log-probability is taken. For the rows of the case that have a target."""
    logits = case.parent("logits")
    rows = case.rows
    if logits is None:
        return
    x = logits[rows].to(torch.float64)
    a, b = (side[rows].to(torch.float64) for side in case.sides)
    stated = [float(t) for t in case.fact("temperature")]
    fitted = [temperature_of(case, rows, x, side)[0] for side in (a, b)]

    def rule(temperature: float = 1.0, dtype: str = "fp32", token: str = "the next", filtered: int = 0, seen: torch.Tensor | None = None) -> Rule:
        def compute() -> torch.Tensor:
            z = x / temperature
            if dtype not in ("fp32", "result to bf16"):
                z = rounded(z, torch.bfloat16)
            if filtered:
                z = z.masked_fill(z < z.topk(filtered, -1).values[:, -1:], float("-inf"))
            if seen is not None:
                z = z.masked_fill(~seen, float("-inf"))
            table = z.log_softmax(-1)
            if dtype == "torch's log-softmax in bf16":
                table = z.to(torch.bfloat16).log_softmax(-1).to(torch.float64)
            if dtype == "every step in bf16":
                z = rounded(z - z.amax(-1, keepdim=True), torch.bfloat16)
                table = z - rounded(rounded(rounded(z.exp(), torch.bfloat16).sum(-1, keepdim=True), torch.bfloat16).log(), torch.bfloat16)
            if dtype not in ("fp32", "logits to bf16"):
                table = rounded(table, torch.bfloat16)
            return _of(case, rows, z if token == "none (logits as they are)" else table, _AHEAD.get(token, 1))

        axes = {
            "temperature": f"{temperature:.4g}",
            "logprob-dtype": dtype,
            "target-shift": token,
            "sampling-filter": "what is left finite" if seen is not None else str(filtered or "none"),
        }
        return Rule(axes, compute)

    yield rule()
    for dtype in _DTYPES:
        for temperature in dict.fromkeys([1.0, *stated, *fitted]):
            yield rule(temperature, dtype)
        for token in (*_AHEAD, "none (logits as they are)"):
            yield rule(dtype=dtype, token=token)
    if case.point.part == "logprob_rows":  # top-p, or a top-k of any size, shows itself
        for side in (a, b):
            left = side.isfinite()
            if not bool(left.all()) and bool(left.any(-1).all()):
                for temperature in {1.0, *stated, *fitted}:
                    yield rule(temperature, seen=left)
    for count in (1, 2, 5, 10, 20, 40, 50, 64, 100, 200):
        if count < x.shape[1]:
            yield rule(filtered=count)


def counted_rows(case: Case) -> tuple[list[str], str] | None:
    """(evidence, side) if one side's denominator holds rows that the vocabulary has not."""
    logits = case.parent("logits")
    rows = case.rows
    if logits is None:
        return None
    x = logits[rows].to(torch.float64)
    true = x.logsumexp(-1)
    for name, side in zip("AB", case.sides, strict=True):
        out = side[rows].to(torch.float64)
        lse = (_of(case, rows, x) - out).mean(-1)
        more = lse.exp() - true.exp()
        noise = 3e-7 * true.exp() * (1 + true.abs())
        if not bool((more > 4 * noise).all()):
            continue
        count = more.mean()
        said = f"in {name} the sum of the softmax is too large for every token"
        if float(more.std(unbiased=False)) < 0.02 * float(count) + float(noise.max()) and float(count) > 0.5:
            said += f", by {float(count):.4g}: that is {round(float(count))} more rows whose logits are 0, as padding rows have"
        widths = [facts.get("vocab_rows") for facts in (case.a.facts, case.b.facts)]
        return [said] + ([f"rows of the vocabulary: {widths[0]} in A, {widths[1]} in B; true size {x.shape[1]}"] if any(widths) else []), name
    return None
