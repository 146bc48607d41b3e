"""Rules: formulas that engines use for one operator, told apart by *axes* (which rounding, which table, which mask). The rule that reproduces a
side is the one the side uses; where the sides' rules differ in an axis, that axis is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from tio_megatron.verify.diagnosis.rounding import one_rounding

CLEAR = 0.5
"""A rule explains a side better than another if its error is below this part of the other's,"""

EXPLAINS = 0.35
"""and explains it at all if its error is below this part of the difference between the sides, and no more than rounding, or nearly nothing of it:"""

FEWEST = 12
"""Elements that differ by rounding alone, below which no rule is told from another: each of them halves the rules that fit by chance."""

NEARLY_ALL = 0.03
"""this part of the difference may stay unexplained where that is more than rounding (a constant that was fitted)."""

ALIKE = 1.3
"""Rules whose errors are within this factor of each other explain a side equally well: the one that changes least is taken."""

FINE = frozenset(
    {"norm-cast", "norm-epsilon", "residual-rounding", "extra-rounding", "rope-table", "dtype", "router-sum-order", "router-dtype", "logprob-dtype"}
)
"""Axes that move last bits. Where sides differ in one of these and in a coarse one, the coarse one is the cause."""


@dataclass(frozen=True)
class Rule:
    """``axes`` say what the rule does; ``compute`` gives its rows (those of the case), in any type; they are rounded to the side's type. ``neutral``: axes
    that mean nothing here (the order of a sum that is not taken), in which it differs from no other rule."""

    axes: dict[str, str]
    compute: Callable[[], torch.Tensor]
    neutral: frozenset[str] = field(default_factory=frozenset)

    def against(self, other: Rule) -> list[str]:
        """Axes in which two rules differ."""
        return [name for name in self.axes if self.axes[name] != other.axes.get(name) and name not in self.neutral | other.neutral]


@dataclass(frozen=True)
class Fit:
    """The best rule of a side, and its relative error there."""

    rule: Rule
    error: float


@dataclass(frozen=True)
class Explained:
    """``a`` and ``b``: the rule each side follows; ``axes`` in which they differ, clearly (empty: the same rule). ``gap``: the sides' relative difference.
    ``usual``: the first rule of the table, ``far`` how far each side is from it. ``ambiguous``: other pairs of rules explain the sides as well, by other axes
    or with the other side departing. ``few``: so many elements differ, by rounding, too few to tell; 0 where they are enough. ``least``: the smallest error
    of any rule on each side."""

    a: Fit
    b: Fit
    axes: tuple[str, ...]
    gap: float
    usual: Rule
    ambiguous: tuple[str, ...] = ()
    far: tuple[float, float] = (0.0, 0.0)
    few: int = 0
    least: tuple[float, float] = (float("inf"), float("inf"))


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """Root mean square of ``x - y`` over that of ``y``, of the elements that are finite in both."""
    x, y = x.to(torch.float64).flatten(), y.to(torch.float64).flatten()
    real = x.isfinite() & y.isfinite()
    if not bool(real.any()):
        return float("inf")
    difference = (x[real] - y[real]).square().mean().sqrt()
    return float(difference / y[real].square().mean().sqrt().clamp_min(1e-30))


def _error(made: torch.Tensor, side: torch.Tensor) -> float:
    """As :func:`relative`; a rule that filters other elements than a side is not the one of that side."""
    made = made.to(side.dtype)
    return float("inf") if bool((made.isinf() != side.isinf()).any()) else relative(made, side)


def explain(rules: Iterable[Rule], a: torch.Tensor, b: torch.Tensor) -> Explained | None:
    """Which rules reproduce ``a`` and ``b`` [r, ...] best; None without rules. The first rule is the usual one and wins ties."""
    fits: list[tuple[Rule, float, float]] = []
    for rule in rules:
        made = rule.compute()
        fits.append((rule, _error(made, a), _error(made, b)))
    if not fits:
        return None
    gap = relative(a, b)
    least = min(fit[1] for fit in fits), min(fit[2] for fit in fits)
    usual = fits[0][0]
    limits = [
        min(EXPLAINS * far, max(one_rounding(side.dtype), NEARLY_ALL * min(far, 1.0))) for side, far in ((a, relative(b, a)), (b, gap))
    ]  # of each side's own size, which the traces' order does not change
    good_a, good_b = _alike(fits, 1), _alike(fits, 2)
    pairs = [
        (x, y) for x in good_a for y in good_b if x[1] < CLEAR * y[1] and y[2] < CLEAR * x[2] and x[1] < limits[0] and y[2] < limits[1] and x[0].against(y[0])
    ]
    # One rule for both, unless each side has one of its own that is clearly better there than the other side's.
    count = int((a.to(torch.float64) != b.to(torch.float64)).sum())
    few = count if count < FEWEST and gap <= max(one_rounding(side.dtype) for side in (a, b)) else 0
    if few or not pairs or any(x[0] is y[0] for x in good_a for y in good_b):
        shared = min(fits, key=lambda fit: max(fit[1], fit[2]))
        return Explained(Fit(shared[0], shared[1]), Fit(shared[0], shared[2]), (), gap, usual, few=few, least=least)

    def changes(pair: tuple[_Tried, _Tried]) -> tuple[int, int, int]:
        between = pair[0][0].against(pair[1][0])
        return len(set(between) - FINE), len(between), len(pair[0][0].against(usual)) + len(pair[1][0].against(usual))

    fewest = min(map(changes, pairs))
    chosen = [pair for pair in pairs if changes(pair) == fewest]
    best = chosen[0]
    axes = _axes(best)
    other = tuple(dict.fromkeys(_axes(pair)[0] for pair in chosen if _axes(pair)[0] != axes[0] or _off(pair, axes[0], usual) != _off(best, axes[0], usual)))
    return Explained(Fit(best[0][0], best[0][1]), Fit(best[1][0], best[1][2]), axes, gap, usual, other, fits[0][1:], least=least)


_Tried = tuple[Rule, float, float]


def _alike(fits: list[_Tried], column: Literal[1, 2]) -> list[_Tried]:
    """The rules that explain a side (its errors are ``column``) as well as the best one does."""
    limit = ALIKE * min(fit[column] for fit in fits)
    return [fit for fit in fits if fit[column] <= limit]


def _axes(pair: tuple[_Tried, _Tried]) -> tuple[str, ...]:
    return tuple(sorted(pair[0][0].against(pair[1][0]), key=lambda axis: axis in FINE))


def _off(pair: tuple[_Tried, _Tried], axis: str, usual: Rule) -> tuple[bool, ...]:
    return tuple(side[0].axes[axis] != usual.axes[axis] for side in pair)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` through ``dtype`` and back to fp64: by fp32, as every kernel keeps its intermediate values, then to ``dtype``."""
    return x.to(torch.float32).to(dtype).to(torch.float64)
