"""logdiff: two recordings of the same tokens, read side by side in bounded memory."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from tio_megatron.verify.readers.scored import Scored
from tio_megatron.verify.trend import Quantiles, Trend

CONTEXT = 4
"""Tokens shown on each side of the first that differs."""

_EXTREME = 2.0
_WORST = 10
_NOTES = 3
_PLACES = 3
"""So many places a list is moved to find out whether it is shifted."""
_CLOSER = 10.0
"""So many times smaller the mean difference of a list that was moved must be."""
_FEWEST = 8
"""Log-probabilities from which a shift is told: of fewer, some place fits by chance."""


@dataclass(frozen=True)
class FirstDifference:
    """The first token whose log-probabilities have different bytes. ``context``: (position, token id, A, B) of it and its neighbours."""

    sequence: int
    position: int
    token: int
    a: float
    b: float
    bytes_a: str
    bytes_b: str
    context: list[tuple[int, int, float | None, float | None]]


@dataclass
class Logdiff:
    """The comparison. ``difference`` is A - B of log-probabilities; A is taken as the trainer, B as the rollout that sampled the tokens.

    ``k1`` and ``k3`` estimate KL(B, A) from tokens sampled by B: the means of ``b - a`` and of ``exp(a - b) - 1 - (a - b)``. The importance ratio
    is ``exp(a - b)``; ``extreme`` counts those above 2 or below 1/2. ``quantiles`` are of the absolute difference, ``trend`` rows are (first,
    behind the last, tokens, mean, largest), ``worst`` the sequences with the largest mean: (mean, sequence, tokens).
    ``uneven`` sequences have another number of log-probabilities on each side; ``notes`` say how the first of them were laid side by side, and by how
    many places the lists of one side are shifted.
    """

    sequences: int = 0
    tokens: int = 0
    nonzero: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    bias: float = 0.0
    quantiles: dict[str, float] = field(default_factory=dict)
    k1: float = 0.0
    k3: float = 0.0
    ratio_min: float = 1.0
    ratio_max: float = 1.0
    extreme: int = 0
    first: FirstDifference | None = None
    by_position: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    by_sequence: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    growth: float = 1.0
    worst: list[tuple[float, int, int]] = field(default_factory=list)
    histogram: list[tuple[float, int]] = field(default_factory=list)
    uneven: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0 equal, 1 differs, 2 could not tell (nothing was compared)."""
        return 2 if not self.tokens else int(self.nonzero > 0)

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.tokens:
            return "could not tell: no token has a log-probability on both sides"
        if not self.nonzero:
            return f"equal: {self.tokens} tokens, logdiff 0"
        return f"differs: {self.nonzero} of {self.tokens} tokens, max {self.max_abs:.4g}, mean {self.mean_abs:.4g}"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists; what is infinite (a ratio beyond fp64) becomes null."""
        plain = {"status": self.status, "verdict": self.verdict, **asdict(self)}
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in plain.items()}


def logdiff(a: Iterable[Scored], b: Iterable[Scored]) -> Logdiff:
    """Compare sequence by sequence; tokens that only one side scored (a prompt, say) are left out.

    Raises:
        ValueError: the recordings are about different tokens; names the sequence and the token.
    """
    found, quantiles, positions, sequences = Logdiff(), Quantiles(), Trend(), Trend()
    total = total_k3 = bias = 0.0
    low, high = math.inf, -math.inf
    shifts: Counter[int] = Counter()
    for index, (left, right) in enumerate(zip_longest(a, b)):
        if left is None or right is None:
            longer, shorter = ("A", "B") if right is None else ("B", "A")
            raise ValueError(f"{longer} has more sequences than {shorter}, which ends after {index}")
        _require_same_tokens(left, right, index)
        count = min(len(left.logprobs), len(right.logprobs))
        found.sequences += 1
        if len(left.logprobs) != len(right.logprobs):
            found.uneven += 1
            if len(found.notes) < _NOTES:
                found.notes.append(_uneven(left, right, index, count))
        if not count:
            continue
        x, y = left.logprobs[len(left.logprobs) - count :], right.logprobs[len(right.logprobs) - count :]
        start = len(left.tokens) - count
        differs = np.ascontiguousarray(x).view(np.uint32) != np.ascontiguousarray(y).view(np.uint32)
        difference = x.astype(np.float64) - y.astype(np.float64)
        size = np.abs(difference)
        if found.first is None and differs.any():
            found.first = _first(left, right, index, start + int(np.argmax(differs)))
        found.tokens += count
        found.nonzero += int(differs.sum())
        found.max_abs = max(found.max_abs, float(size.max()))
        total += float(size.sum())
        bias += float(difference.sum())
        with np.errstate(over="ignore"):
            total_k3 += float((np.expm1(difference) - difference).sum())
        low, high = min(low, float(difference.min())), max(high, float(difference.max()))
        found.extreme += int((size > math.log(_EXTREME)).sum())
        quantiles.add(size)
        positions.add(np.arange(start, start + count), size)
        sequences.add(np.full(count, index), size)
        shift = _shift(left.logprobs, right.logprobs)
        if shift:
            shifts[shift] += 1
        item = (float(size.mean()), index, count)
        if item[0] > 0:
            (heapq.heappush if len(found.worst) < _WORST else heapq.heappushpop)(found.worst, item)
    if found.tokens:
        found.mean_abs, found.bias = total / found.tokens, bias / found.tokens
        found.k1, found.k3 = -found.bias, total_k3 / found.tokens
        found.ratio_min, found.ratio_max = _exp(low), _exp(high)
    found.quantiles = {name: min(quantiles[q], found.max_abs) for name, q in (("50%", 0.5), ("90%", 0.9), ("99%", 0.99), ("99.9%", 0.999))}
    found.by_position, found.by_sequence, found.growth = positions.rows(), sequences.rows(), positions.growth()
    found.worst.sort(reverse=True)
    if found.uneven > len(found.notes):
        found.notes.append(f"{found.uneven - len(found.notes)} more sequences have another number of log-probabilities on each side")
    if shifts:
        shift, times = shifts.most_common(1)[0]
        places = f"{abs(shift)} {'place' if abs(shift) == 1 else 'places'} {'later' if shift > 0 else 'earlier'}"
        found.notes.append(f"B's list stands {places} than A's in {times} of {found.sequences} sequences: moved back, they agree {_CLOSER:g} times better")
    found.histogram = _histogram(quantiles)
    return found


def _shift(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> int:
    """By how many places ``b`` stands later than ``a``, where moving it back makes the two agree far better than where both end together; else 0.

    The same entries of either list are compared before and after the move: a difference that the move only pushes over the end of a list proves nothing.
    """
    end = len(b) - len(a)  # a[i] lies beside b[i + end]
    first = max(0, -end)
    still = np.abs(a[first:].astype(np.float64) - b[first + end :])
    found, least = 0, math.inf
    for offset in {*range(end - _PLACES, end + _PLACES + 1), 0} - {end}:  # 0 lays the beginnings side by side
        start, stop = max(0, -offset), min(len(a), len(b) - offset)
        if stop - start < _FEWEST or not still.any():
            continue
        moved = float(np.abs(a[start:stop].astype(np.float64) - b[start + offset : stop + offset]).mean())
        before = (still[max(0, at - first) : max(0, at - first + stop - start)] for at in (start, start + offset - end))
        if moved < least and _CLOSER * moved < min(float(part.mean()) for part in before):
            found, least = offset - end, moved
    return found


def _uneven(a: Scored, b: Scored, index: int, count: int) -> str:
    """How the two sides of a sequence were laid side by side."""
    how = f"the last {count}, aligned at the end" if count else "none of them"
    return f"A scores {len(a.logprobs)} tokens of sequence {index}, B {len(b.logprobs)}; compared: {how}"


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _require_same_tokens(a: Scored, b: Scored, index: int) -> None:
    count = min(len(a.tokens), len(b.tokens))  # a side that left the prompt out is compared from the end
    if (count < len(a.tokens) and b.first) or (count < len(b.tokens) and a.first):
        raise ValueError(f"sequence {index} has {len(a.tokens)} tokens in A and {len(b.tokens)} in B ({a.where}; {b.where})")
    x, y = a.tokens[len(a.tokens) - count :], b.tokens[len(b.tokens) - count :]
    if (x != y).any():
        at = int(np.argmax(x != y))
        if len(a.tokens) != len(b.tokens):
            raise ValueError(f"sequence {index} has {len(a.tokens)} tokens in A and {len(b.tokens)} in B; neither ends with the other ({a.where}; {b.where})")
        raise ValueError(f"sequence {index} holds other tokens: token {at} is {x[at]} in A and {y[at]} in B ({a.where}; {b.where})")


def _first(a: Scored, b: Scored, index: int, position: int) -> FirstDifference:
    """``position`` counts from the start of A's tokens."""
    shift = len(b.tokens) - len(a.tokens)

    def value(side: Scored, at: int) -> float | None:
        return float(side.logprobs[at - side.first]) if side.first <= at < len(side.tokens) else None

    around = range(max(0, position - CONTEXT), min(len(a.tokens), position + CONTEXT + 1))
    context = [(at, int(a.tokens[at]), value(a, at), value(b, at + shift)) for at in around]
    x, y = (np.float32(value(side, at)) for side, at in ((a, position), (b, position + shift)))
    bytes_a, bytes_b = (number.tobytes()[::-1].hex() for number in (x, y))
    return FirstDifference(index, position, int(a.tokens[position]), float(x), float(y), bytes_a, bytes_b, context)


def _histogram(quantiles: Quantiles) -> list[tuple[float, int]]:
    """(lower edge, tokens) by powers of two of the absolute difference; zeros stand under 0."""
    by_exponent = quantiles.counts.reshape(-1, 128).sum(axis=1)
    return [(0.0 if e == 0 else 2.0 ** (e - 127), int(n)) for e, n in enumerate(by_exponent.tolist()) if n]
