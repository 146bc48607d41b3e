"""Which keys each token of a side saw, solved from what went in and what came out, where no mask of the table is the one.

Legend: n keys of the token's own sequence, Q query heads, D head size. All heads of a token see the same keys, so Q * D equations stand against n unknowns.
"""

from __future__ import annotations

import torch

from tio_megatron.verify.diagnosis.attention_rules import Heads
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rounding import one_rounding

_MOST_KEYS = 512
_MOST_FLIPS = 64


def solved(case: Case, heads: Heads) -> tuple[list[str], str] | None:
    """(evidence, side) if one side follows from other keys, the same for all heads, and they are no run that ends at the token itself (a window, or another
    begin of the sequence, is found by its begin). None where no set of keys gives the rows."""
    said: dict[str, list[str]] = {}
    for label, side in zip("AB", case.sides, strict=True):
        noise = 2 * one_rounding(side.dtype)
        moved = explained = 0
        shown = ""
        plain = True
        for i, row in enumerate(heads.rows.tolist()):
            out = side[row].to(torch.float64).reshape(heads.q.shape[1], -1)
            begin, end = int(heads.begin[i]), int(heads.end[i])
            n, own = end - begin, row - begin
            if not 2 <= n <= min(_MOST_KEYS, out.numel() // 2):
                continue
            usual = torch.arange(n) <= own
            problem = _Row(heads, i, begin, end, out)
            if problem.error(usual) < 4 * noise:
                continue
            moved += 1
            seen = min((problem.refined(start, noise) for start in (usual, problem.start())), key=problem.error)
            if problem.error(seen) > noise:
                continue
            explained += 1
            first = int(seen.nonzero()[0])
            if not torch.equal(seen, usual & (torch.arange(n) >= first)):
                plain = False
                sequence, position = case.a.where(row)
                shown = shown or f"in {label}, token {position} of sequence {sequence} sees the keys {_runs(seen)} of its sequence in place of 0-{own}"
        if not plain and explained >= max(2, 0.8 * moved):
            come = f"{explained} of {moved} tokens that do not follow from the usual mask come out"
            said[label] = [shown, f"computed with such keys, the same for all heads, {come}"]
    if not said:
        return None
    return [line for lines in said.values() for line in lines], next(iter(said)) if len(said) == 1 else ""


class _Row:
    """One token: what its keys would add to the numerator [Q, n, D] and to the denominator [Q, n], and what came out [Q, D]."""

    def __init__(self, heads: Heads, i: int, begin: int, end: int, out: torch.Tensor) -> None:
        group = heads.group()
        scores = torch.einsum("qd,tqd->qt", heads.q[i], heads.k[begin:end][:, group]) * heads.q.shape[-1] ** -0.5
        self.below = (scores - scores.amax(-1, keepdim=True)).exp()
        self.above = self.below[..., None] * heads.v[begin:end][:, group].transpose(0, 1)
        self.out = out
        self.size = out.square().mean().clamp_min(1e-60)

    def error(self, seen: torch.Tensor) -> float:
        """Relative, with the keys ``seen`` [n]."""
        if not bool(seen.any()):
            return float("inf")
        made = self.above[:, seen].sum(1) / self.below[:, seen].sum(1)[:, None]
        return float(((made - self.out).square().mean() / self.size).sqrt())

    def start(self) -> torch.Tensor:
        """[n]: keys by the weights that solve ``sum of weight * (value - out) = 0`` in every head, cut at one half."""
        equations = (self.above - self.below[..., None] * self.out[:, None]).transpose(1, 2).flatten(0, 1)
        weights = torch.linalg.svd(equations, full_matrices=True).Vh[-1]
        counts = equations.square().sum(0)
        one = float((counts * weights.square()).sum() / (counts * weights).sum()) if float((counts * weights).sum().abs()) > 0 else 1.0
        return weights / one > 0.5

    def refined(self, seen: torch.Tensor, noise: float) -> torch.Tensor:
        """``seen`` with one key after the other added or left out as long as that helps: the lightest keys are not told by the solution."""
        seen = seen.clone()
        error = self.error(seen)
        for _ in range(_MOST_FLIPS):
            if error < 0.5 * noise:
                break
            sign = torch.where(seen, -1.0, 1.0).to(torch.float64)
            above = self.above[:, seen].sum(1)[:, None] + sign[:, None] * self.above
            below = self.below[:, seen].sum(1)[:, None] + sign * self.below
            errors = ((above / below[..., None].clamp_min(1e-30) - self.out[:, None]).square().mean(dim=(0, 2)) / self.size).sqrt()
            if int(seen.sum()) == 1:
                errors[seen] = float("inf")
            best = int(errors.argmin())
            if not float(errors[best]) < error:
                break
            seen[best] = ~seen[best]
            error = self.error(seen)
        return seen


def _runs(seen: torch.Tensor) -> str:
    """The keys in words: 0-1, 9-14."""
    runs: list[list[int]] = []
    for key in seen.nonzero()[:, 0].tolist():
        if runs and runs[-1][1] == key - 1:
            runs[-1][1] = key
        else:
            runs.append([key, key])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:6]]
    return ", ".join(said) + (" ..." if len(runs) > 6 else "")
