"""Attention: which keys a token sees, the scale, roundings inside. Legend: r rows, T tokens of the trace, Q query heads, G key/value heads, D head size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rounding import one_rounding
from tio_megatron.verify.diagnosis.rules import Rule, relative, rounded

MOST = 16


@dataclass(frozen=True)
class Heads:
    """Queries [r, Q, D] of the rows, keys and values [T, G, D] of all tokens, fp64; ``begin`` and ``end`` [r] bound each row's own sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    dtype: torch.dtype

    def scores(self, scale: float | None = None, grouping: str = "neighbours") -> torch.Tensor:
        """[r, Q, T] scaled scores."""
        return torch.einsum("rqd,tqd->rqt", self.q, self.k[:, self.group(grouping)]) * (scale or self.q.shape[-1] ** -0.5)

    def group(self, grouping: str = "neighbours") -> torch.Tensor:
        """[Q]: the key/value head of each query head."""
        heads, groups = self.q.shape[1], self.k.shape[1]
        own = torch.arange(heads) // (heads // groups)
        return {"neighbours": own, "strided": torch.arange(heads) % groups, "backwards": groups - 1 - own, "the next group": (own + 1) % groups}[grouping]

    def attend(
        self,
        visible: torch.Tensor,
        scores: torch.Tensor | None = None,
        probabilities: str = "fp32",
        grouping: str = "neighbours",
        narrow: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[r, Q, D] with ``visible`` [r, T]."""
        s = (self.scores(grouping=grouping) if scores is None else scores).masked_fill(~visible[:, None], float("-inf"))
        p = (s - s.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True)
        if probabilities == "normalised, then rounded":
            p, total = rounded(p / total, narrow or self.dtype), torch.ones_like(total)
        elif probabilities == "rounded, then normalised":
            p = rounded(p, narrow or self.dtype)
        return torch.einsum("rqt,tqd->rqd", p / total, self.v[:, self.group(grouping)])

    def causal(self) -> torch.Tensor:
        """[r, T]: a row's own sequence up to itself."""
        at = torch.arange(len(self.k))
        return (at >= self.begin[:, None]) & (at <= self.rows[:, None])


def heads_of(case: Case, most: int = MOST) -> Heads | None:
    """From the recorded inputs, or None where they were not kept."""
    q, k, v = (case.parent(part) for part in ("q_rope", "k_rope", "v_proj"))
    size = int(case.a.shape.get("head_dim") or 0)
    if q is None or k is None or v is None or not size:
        return None
    rows = case.rows[torch.linspace(0, len(case.rows) - 1, min(most, len(case.rows))).round().to(torch.int64).unique()]
    stops = torch.from_numpy(np.cumsum(case.a.lengths))
    sequence = torch.searchsorted(stops, rows, right=True)
    end = stops[sequence]
    begin = end - torch.tensor(case.a.lengths)[sequence]
    real = torch.stack([tensor.isfinite().all(-1) for tensor in (q, k, v)]).all(0)  # a sequence that holds a NaN says nothing
    whole = torch.tensor([bool(real[first:stop].all()) for first, stop in zip(begin.tolist(), end.tolist(), strict=True)], dtype=torch.bool)
    whole &= torch.stack([side[rows].isfinite().all(-1) for side in case.sides]).all(0)
    rows, begin, end = rows[whole], begin[whole], end[whole]
    wide = [tensor.to(torch.float64).reshape(len(tensor), tensor.shape[1] // size, size) for tensor in (q[rows], k, v)]
    return Heads(wide[0], wide[1], wide[2], rows, begin, end, min(case.dtypes, key=lambda dtype: dtype.itemsize))


def attention_rules(case: Case, heads: Heads) -> Iterator[Rule]:
    """Axes: visible keys, scale, grouping of heads, roundings of probabilities and scores. For the rows of ``heads``."""
    at = torch.arange(len(heads.k))
    own, rows = heads.causal(), heads.rows[:, None]
    call_a = torch.from_numpy(case.a.passes["call"])
    call_b = torch.from_numpy(case.b.passes["call"])
    masks = {
        "own sequence": own,
        "the whole pack": at <= rows,
        "later tokens too": (at >= heads.begin[:, None]) & (at < heads.end[:, None]),
        "one token more": (at >= heads.begin[:, None]) & (at <= rows + 1) & (at < heads.end[:, None]),
        "not itself": own & ((at < rows) | (at == heads.begin[:, None])),
        "only this pass": own & ((call_a == call_a[heads.rows][:, None]) & (call_b == call_b[heads.rows][:, None])),
    }
    width = heads.q.shape[-1]
    shape = case.sides[0].shape[1:]

    def rule(
        mask: str = "own sequence",
        scale: float = width**-0.5,
        probabilities: str = "fp32",
        scores: str = "fp32",
        grouping: str = "neighbours",
        narrow: torch.dtype = heads.dtype,
    ) -> Rule:
        def compute() -> torch.Tensor:
            s = heads.scores(scale, grouping)
            if scores == "rounded, scaled, rounded":
                s = rounded(rounded(heads.scores(1.0, grouping), narrow) * scale, narrow)
            elif scores == "rounded":
                s = rounded(s, narrow)
            return heads.attend(masks[mask], s, probabilities, grouping, narrow).reshape(-1, *shape)

        axes = {
            "visible": mask,
            "attention-scale": f"{scale:.6g}",
            "extra-rounding": f"probabilities {probabilities}, scores {scores}"
            + (f", to {str(narrow).removeprefix('torch.')}" if narrow != heads.dtype else ""),
            "head-groups": grouping,
        }
        return Rule(axes, compute)

    score_roundings = ("fp32", "rounded", "rounded, scaled, rounded")
    roundings = [(p, s) for p in ("fp32", "normalised, then rounded", "rounded, then normalised") for s in score_roundings]
    usual = heads.attend(own).reshape(-1, *shape)
    fitted = [_scale_of(heads, own, side[heads.rows]) for side in case.sides if relative(usual, side[heads.rows]) > one_rounding(side.dtype)]
    scales = dict.fromkeys([1 / width, 1.0, (width * heads.q.shape[1]) ** -0.5, width**-0.5 * 1.44269504, *fitted])
    others: list[dict[str, Any]] = [{"mask": mask} for mask in list(masks)[1:]] + [{"scale": scale} for scale in scales]
    others += [{"grouping": grouping} for grouping in ("strided", "backwards", "the next group")]
    for probabilities, scores in roundings:
        yield rule(probabilities=probabilities, scores=scores)
        for other in others if heads.dtype != torch.float32 or scores == probabilities else ():  # beside what both sides round anyway
            yield rule(probabilities=probabilities, scores=scores, **other)
    for kind in (torch.bfloat16, torch.float16) if heads.dtype == torch.float32 else ():
        for probabilities, scores in roundings[1:]:
            yield rule(probabilities=probabilities, scores=scores, narrow=kind)


def _scale_of(heads: Heads, visible: torch.Tensor, out: torch.Tensor) -> float:
    """The factor of the scores that explains ``out`` [r, ...] best, from a thirtieth to thirty times the usual one."""
    usual, scores = heads.q.shape[-1] ** -0.5, heads.scores(1.0)
    low, high, best = -3.4, 3.4, (0.0, float("inf"))
    for _ in range(7):
        grid = torch.linspace(low, high, 15, dtype=torch.float64).tolist()
        for exponent in grid:
            error = relative(heads.attend(visible, scores * (usual * math.exp(exponent))).reshape(out.shape), out)
            if error < best[1]:
                best = (exponent, error)
        step = (high - low) / 14
        low, high = best[0] - step, best[0] + step
    factor = math.exp(best[0])
    nice = round(factor, 2)
    return usual * (nice if abs(nice - factor) < 2e-3 * factor else factor)


def first_visible(heads: Heads, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row the first key that best explains ``out`` [r, Q, D] if all keys from it to the row itself are visible, and the error [r]."""
    best = heads.rows.clone()
    errors = torch.full((len(heads.rows),), float("inf"), dtype=torch.float64)
    s = heads.scores()
    group = heads.group()
    for i, row in enumerate(heads.rows.tolist()):
        scores = s[i, :, : row + 1].flip(-1)  # from the row itself backwards
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        values = heads.v[: row + 1][:, group].flip(0)
        made = torch.einsum("qt,tqd->tqd", p, values).cumsum(0) / p.cumsum(-1).t()[..., None]
        gaps = (made - out[i].to(torch.float64)).square().mean(dim=(1, 2))
        found = int(gaps.argmin())
        best[i], errors[i] = row - found, (gaps[found] / out[i].to(torch.float64).square().mean().clamp_min(1e-30)).sqrt()
    return best, errors


def window(case: Case, heads: Heads) -> tuple[str, list[str], str] | None:
    """(cause, evidence, side): a boundary that is not the sequence's own explains one side, and the causal rule does not."""
    shape = heads.q.shape
    chosen = [side[heads.rows].reshape(shape) for side in case.sides]
    usual = heads.attend(heads.causal())
    for name, out in zip("AB", chosen, strict=True):
        plain = [relative(usual[i], out[i]) for i in range(len(heads.rows))]
        first, errors = first_visible(heads, out)
        moved = [i for i in range(len(heads.rows)) if int(first[i]) != int(heads.begin[i]) and float(errors[i]) < min(0.1, 0.25 * plain[i])]
        if len(moved) < max(1, len(heads.rows) // 2):
            continue
        earlier = [i for i in moved if first[i] < heads.begin[i]]
        spans = {int(heads.rows[i] - first[i]) + 1 for i in moved}
        starts = {int(first[i] - heads.begin[i]) for i in moved}
        row, start = int(heads.rows[moved[0]]), int(first[moved[0]])
        sequence, position = case.a.where(row)
        begin = int(heads.begin[moved[0]])
        if earlier:
            text = (
                f"in {name}, token {position} of sequence {sequence} attends from {begin - start} tokens before its sequence on, into its neighbour in the pack"
            )
            return "packing", [text], name
        if len(spans) == 1 and len(starts) > 1:
            return "mask", [f"in {name}, every token sees the last {spans.pop()} keys only: a sliding window"], name
        text = f"in {name}, token {position} of sequence {sequence} sees its sequence from token {start - begin} on; earlier keys are cut off"
        if len(spans) == 1:
            return "", [text, "a sliding window and a wrong boundary of a packed sequence both do that to one place: record longer sequences to tell"], name
        return (
            "packing",
            [text, "the boundary is not where the sequence begins: lengths with padding were taken for the true ones, or the other way round"],
            name,
        )
    return None
