"""Rules: formulas that engines use for one operator, told apart by *axes* (which rounding, which table, which mask). The rule that reproduces a
side is the one the side uses; where the sides' rules differ in an axis, that axis is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

CLEAR = 0.5
"""A rule explains a side better than another if its error is below this part of the other's,"""

EXPLAINS = 0.35
"""and explains it at all if its error is below this part of the difference between the sides,"""

REMAINS = {torch.bfloat16: 0.03, torch.float16: 0.01}
LEFT = 0.05
"""and what it leaves is rounding (of these types; 1e-4 of wider ones), or below this part of that difference. A rule that leaves more is not the formula,
however much better than the others it is."""

ALIKE = 1.25
"""Rules whose errors are within this factor explain a side equally well: the one closest to the usual is taken."""

FINE = frozenset(
    {"norm-cast", "norm-epsilon", "residual-rounding", "extra-rounding", "rope-table", "dtype", "router-sum-order", "router-dtype", "logprob-dtype"}
)
"""Axes that move last bits. Where sides differ in one of these and in a coarse one, the coarse one is the cause."""


@dataclass(frozen=True)
class Rule:
    """``axes`` say what the rule does; ``compute`` gives its rows (those of the case), in any type; they are rounded to the side's type."""

    axes: dict[str, str]
    compute: Callable[[], torch.Tensor]
    neutral: frozenset[str] = field(default_factory=frozenset)

    def against(self, other: Rule) -> list[str]:
        """Axes in which two rules differ."""
        return [name for name in self.axes if self.axes[name] != other.axes.get(name) and name not in self.neutral]


@dataclass(frozen=True)
class Fit:
    """The best rule of a side, and its relative error there."""

    rule: Rule
    error: float


@dataclass(frozen=True)
class Explained:
    """``a`` and ``b``: the rule each side follows; ``axes`` in which they differ, clearly (empty: the same rule). ``gap``: the sides' relative difference.
    ``usual``: the first rule of the table."""

    a: Fit
    b: Fit
    axes: tuple[str, ...]
    gap: float
    usual: Rule


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """Root mean square of ``x - y`` over that of ``y``, of the elements that are finite in both."""
    x, y = x.to(torch.float64).flatten(), y.to(torch.float64).flatten()
    real = x.isfinite() & y.isfinite()
    if not bool(real.any()):
        return float("inf")
    difference = (x[real] - y[real]).square().mean().sqrt()
    return float(difference / y[real].square().mean().sqrt().clamp_min(1e-30))


def explain(rules: Iterable[Rule], a: torch.Tensor, b: torch.Tensor) -> Explained | None:
    """Which rules reproduce ``a`` and ``b`` [r, ...] best; None without rules. The first rule is the usual one and wins ties."""
    fits: list[tuple[Rule, float, float]] = []
    for rule in rules:
        made = rule.compute()
        fits.append((rule, relative(made.to(a.dtype), a), relative(made.to(b.dtype), b)))
    if not fits:
        return None
    gap = relative(a, b)
    best_a, best_b = (_closest(fits, side) for side in (1, 2))
    remains = max(REMAINS.get(side.dtype, 1e-4) for side in (a, b))
    # One rule for both, unless each side has one of its own that is clearly better there than the other side's.
    apart = best_a[1] < CLEAR * best_b[1] and best_b[2] < CLEAR * best_a[2] and max(best_a[1], best_b[2]) < min(EXPLAINS * gap, max(LEFT * gap, remains))
    axes = tuple(sorted(best_a[0].against(best_b[0]), key=lambda axis: axis in FINE)) if apart else ()
    if not axes:
        shared = min(fits, key=lambda fit: max(fit[1], fit[2]))
        best_a = best_b = shared
    return Explained(Fit(best_a[0], best_a[1]), Fit(best_b[0], best_b[2]), axes, gap, fits[0][0])


def _closest(fits: list[tuple[Rule, float, float]], side: int) -> tuple[Rule, float, float]:
    """Of the rules that reproduce a side (1 A, 2 B) as well as the best, the one with the fewest axes that are not the usual rule's."""
    errors = [fit[1] if side == 1 else fit[2] for fit in fits]
    alike = [fit for fit, error in zip(fits, errors, strict=True) if error <= ALIKE * min(errors)]
    return min(alike, key=lambda fit: len(fit[0].against(fits[0][0])))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` through ``dtype`` and back to fp64: by fp32, as every kernel keeps its intermediate values, then to ``dtype``."""
    return x.to(torch.float32).to(dtype).to(torch.float64)
