"""Parameters that differ: missing, stale, transposed, another type, somebody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tio_megatron.traces.reader import Trace
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.grids import grid_of, rounded


def differing(a: Trace, b: Trace, names: list[str]) -> list[str]:
    """Those of ``names`` whose digests differ, or that only one side has while both recorded parameters."""
    if not a.weights or not b.weights:
        return []
    some = any(side.facts.get("weights") == "some" for side in (a, b))  # an engine that packs its weights cannot give all of them back
    found = []
    for name in names:
        x, y = a.weights.get(name), b.weights.get(name)
        if some and (x is None or y is None):
            continue
        if (x is None) != (y is None) or (x and y and (x["digest"] != y["digest"] or x["shape"] != y["shape"])):
            found.append(name)
    return found


def explain_parameter(a: Trace, b: Trace, name: str) -> Finding:
    """What is wrong with the parameter ``name``."""
    x, y = a.weights.get(name), b.weights.get(name)
    if x is None or y is None:
        side = "A" if x is None else "B"
        return _finding("weights-missing", name, side, f"{side} has no parameter {name}")
    if x["shape"] != y["shape"]:
        if x["shape"] == y["shape"][::-1]:
            same = x["digest"] == y.get("transposed")
            return _finding("weights-transposed", name, "", f"{x['shape']} in A, {y['shape']} in B" + ("; each is the other's transpose" if same else ""))
        return _finding("weights-shape", name, "", f"{x['shape']} in A, {y['shape']} in B")
    if x.get("transposed") is not None and x["transposed"] == y["digest"]:
        return _finding("weights-transposed", name, "", "A's transpose is B's")
    if x["rounded"] == y["digest"] or y["rounded"] == x["digest"]:
        side, types = ("B", (x, y)) if x["rounded"] == y["digest"] else ("A", (y, x))
        return _finding("weights-dtype", name, side, f"{side}'s is the other side's rounded to bf16 (recorded as {types[1]['dtype']} and {types[0]['dtype']})")
    sources = {}
    for side, mine, theirs in (("B", y, a.weights), ("A", x, b.weights)):
        source = next((other for other, entry in theirs.items() if other != name and entry["digest"] == mine["digest"] and entry["shape"] == mine["shape"]), "")
        if source and not _constant((b if side == "B" else a).sketches.get(name)):
            sources[side] = source
    if sources:
        said = [f"{side} holds in its place the tensor that the other side calls {source}" for side, source in sources.items()]
        # Tensors that changed places look the same from both sides; only one that one side holds twice, and the other's nowhere, tells.
        side = next(iter(sources)) if len(sources) == 1 else ""
        return _finding("weights-moved", name, side, "; ".join(said), source=next(iter(sources.values())))
    return _by_values(a, b, name)


def _by_values(a: Trace, b: Trace, name: str) -> Finding:
    whole = (a.weight(name), b.weight(name))
    p, q = (whole[0].double().flatten().numpy(), whole[1].double().flatten().numpy()) if whole[0] is not None and whole[1] is not None else (None, None)
    if p is None or q is None:
        p, q = (side.sketches.get(name) for side in (a, b))
    if p is None or q is None:
        return _finding("weights-stale", name, "", "the digests differ; the values were not kept")
    p, q = p.astype(np.float64), q.astype(np.float64)
    for side, values in (("A", p), ("B", q)):
        if not np.isfinite(values).all():
            return _finding("weights-missing", name, side, f"{side}'s holds {int((~np.isfinite(values)).sum())} values that are no numbers")
        if values.size > 1 and np.ptp(values) == 0 and np.ptp(p if side == "B" else q) > 0:
            return _finding("weights-missing", name, side, f"{side}'s is {values[0]:g} everywhere, as an initial value is")
    gap = float(np.sqrt(np.mean((p - q) ** 2)) / max(np.sqrt(np.mean(p**2)), 1e-30))
    correlation = _correlation(p, q)
    ratio = float((p * q).sum() / max((p * p).sum(), 1e-300))
    if abs(ratio - 1) > 1e-3 and np.sqrt(np.mean((q - ratio * p) ** 2)) < min(0.01, 0.3 * abs(ratio - 1)) * np.sqrt(np.mean(q**2)):
        return _finding("weights-scaled", name, "", f"B's is {ratio:.6g} times A's", ratio=ratio)
    for side, rough, fine in (("B", q, p), ("A", p, q)):
        if grid := grid_of(rough, fine, tuple(whole[0].shape) if whole[0] is not None else p.shape):
            return _finding("weights-dtype", name, side, f"{side}'s is the other side's rounded to {grid}")
    for side, halves in (("A", (p, q)), ("B", (q, p))):
        if _one_in_two_types(*halves):
            other = "B" if side == "A" else "A"
            return _finding("weights-dtype", name, "", f"{side} holds in bfloat16 what {other} holds in float16: both rounded from the same values")
    if whole[0] is not None and whole[1] is not None and whole[0].dim() == 2 and whole[0].shape == whole[1].shape:
        turned = [w.double().t().reshape(-1).numpy() for w in whole if w is not None]
        if np.array_equal(turned[0], q) or np.array_equal(turned[1], p):
            return _finding("weights-transposed", name, "", "one side holds the other's transpose, read in the shape of the parameter")
    if whole[0] is not None and whole[1] is not None and whole[0].dim() == 2:
        rows_a, rows_b = (np.sort(w.double().numpy().view(np.float64).sum(1)) for w in whole if w is not None)
        if correlation < 0.9 and np.array_equal(rows_a, rows_b):
            return _finding("weights-rows", name, "", "both sides hold the same rows in another order")
    if correlation < 0.9 and (said := _rows_of_others(a, b, name)):
        return _finding("weights-rows", name, "", said)
    if whole[0] is not None and p.size > 2 and np.array_equal(np.sort(p), np.sort(q)):
        return _finding("weights-rows", name, "", "both sides hold the same elements in another order")
    if correlation > 0.3 or gap < 0.5:
        return _finding(
            "weights-stale", name, "", f"relative difference {gap:.3g}, correlation {correlation:.4f}: another version of the same parameter", gap=gap
        )
    spread = [float(np.std(values)) for values in (p, q)]
    said = (
        f"correlation {correlation:.3f}: the values have nothing to do with each other (spread {spread[0]:.3g} and {spread[1]:.3g}): "
        "another tensor, or one side was never loaded"
    )
    return _finding("weights-missing", name, "", said)


def _rows_of_others(a: Trace, b: Trace, name: str) -> str:
    """In words, that the rows of one side's parameter are the other side's rows of this one and of its neighbours (q, k, v; gate, up): a fused projection
    was cut in another order. "" where they are not, or were not kept."""
    family = [other for other in a.weights if other.rsplit(".", 2)[0] == name.rsplit(".", 2)[0]]
    for label, mine, theirs in (("B", b, a), ("A", a, b)):
        weight = mine.weight(name)
        if weight is None or weight.dim() != 2:
            return ""
        home: dict[bytes, str] = {}
        for other in [name, *family]:
            held = theirs.weight(other)
            if held is not None and held.dim() == 2 and held.shape[1] == weight.shape[1]:
                for row in _rows(held):
                    home.setdefault(row, other)
        found = [home.get(row, "") for row in _rows(weight)]
        counts = {other: found.count(other) for other in dict.fromkeys(found) if other}
        if sum(counts.values()) > 0.9 * len(found) and len(home) > len(found) // 2:
            said = ", ".join(f"{count} of {other}" for other, count in sorted(counts.items(), key=lambda pair: -pair[1]))
            return f"{label} holds in it the other side's rows of several parameters: {said}"
    return ""


def _rows(weight: torch.Tensor) -> list[bytes]:
    """Each row's bytes, of the numbers it holds whatever their type."""
    return [row.tobytes() for row in weight.to(torch.float64).numpy()]


def _constant(sketch: np.ndarray[Any, Any] | None) -> bool:
    return sketch is None or (sketch.size > 1 and float(np.ptp(sketch)) == 0.0)


def _correlation(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    if p.size < 2:
        return 1.0
    # A norm's weights lie around 1: what they have in common is the deviation from their mean.
    x, y = p - p.mean(), q - q.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / size if size > 0 else 1.0


def _one_in_two_types(coarse: np.ndarray[Any, Any], fine: np.ndarray[Any, Any]) -> bool:
    """Whether there are values of which ``coarse`` is the bfloat16 and ``fine`` the float16: no pair is further apart than half a step of bfloat16 and
    half a step of float16. Elements that both types hold say nothing; all of them alike would not differ."""
    if not (np.array_equal(rounded(coarse, "bfloat16"), coarse) and np.array_equal(rounded(fine, "float16"), fine)):
        return False
    if np.array_equal(rounded(fine, "bfloat16"), fine):
        return False
    largest = np.maximum(np.abs(coarse), np.abs(fine))
    power = 2.0 ** np.floor(np.log2(np.maximum(largest, 2.0**-126)))
    return bool((np.abs(coarse - fine) <= power * 2.0**-8 + np.maximum(power * 2.0**-11, 2.0**-25)).all())


def _finding(cause: str, name: str, side: str, evidence: str, **details: Any) -> Finding:
    return Finding("weights", cause, parameter=name, side=side, evidence=(evidence,), details=details, cure=CURES[cause])
