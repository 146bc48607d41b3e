"""Rules of rotary embedding. Legend: r rows of the case, D head size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.elementwise_rules import low
from tio_megatron.verify.diagnosis.rope_places import in_words, turned_by
from tio_megatron.verify.diagnosis.rules import Rule, rounded

_THETAS = (10000.0, 500000.0, 1000000.0, 5000000.0, 10000000.0)

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_ANGLES = {"fp32": ("fp64", "bf16", "fp16"), "bf16": ("fp64", "bf16"), "fp16": ("fp64", "fp16"), "e4m3": ("fp64",), "e5m2": ("fp64",)}
"""Types of the angles, by that of the frequencies: a model that was cast whole has both in one."""
_TABLES = [f"{frequencies}/{angles}/{table}" for table in _TYPES for frequencies, kinds in _ANGLES.items() for angles in kinds] + ["fp64/fp64/fp32"]
"""Types of frequencies, angles, and the table of cosines and sines. The first is the usual one."""


def _table_name(table: str) -> str:
    """What is narrow in it, in words."""
    parts = zip(table.split("/"), ("frequencies", "angles", "table"), strict=True)
    return ", ".join(f"{kind} {what}" for kind, what in parts if kind not in ("fp32", "fp64")) or "fp32"


def rope_rules(case: Case) -> Iterator[Rule]:
    """Axes: table's precision, positions, theta, which elements are turned together, roundings of the arithmetic."""
    x = case.input(case.point.parents[0])
    if x is None:
        return
    size = int(case.a.shape.get("head_dim") or 0)
    if not size or math.prod(x.shape[1:]) % size:
        return
    dtype, rows = low(case), case.rows
    shape = x[rows].shape
    v = x[rows].to(torch.float64).reshape(len(rows), -1, size)
    own = torch.tensor([case.a.where(int(row))[1] for row in rows], dtype=torch.float64)
    recorded = case.parent("positions")
    if recorded is not None:
        own = recorded[rows].reshape(-1).to(torch.float64)
    thetas = [float(theta) for theta in case.fact("rope_theta", 1e6)]

    places = {"own": own, "all 0": own * 0, "run on over the pack": rows.to(torch.float64)}
    scaled: dict[str, torch.Tensor] = {}
    for theta in thetas:
        for side in case.sides:
            solved = turned_by(v, side[rows].to(torch.float64).reshape(v.shape), theta)
            said = in_words(solved, own) if solved is not None else None
            if said is not None:
                (places if said[0] == "positions" else scaled).setdefault(said[1], said[2])

    def rule(
        table: str = "fp32/fp64/fp32",
        positions: str = "own",
        theta: float = thetas[0],
        turn: str = "halves",
        arithmetic: str = "one rounding",
        scaling: str = "",
    ) -> Rule:
        def compute() -> torch.Tensor:
            place = scaled[scaling] if scaling else places[positions]
            frequencies, angles, values = table.split("/")
            inverse = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
            if frequencies != "fp64":
                inverse = inverse.to(_TYPES[frequencies]).to(torch.float64)
            angle = place[:, None] * inverse
            if angles != "fp64":
                angle = angle.to(torch.float32).to(_TYPES[angles]).to(torch.float64)
            cos, sin = (x.to(torch.float32).to(_TYPES[values]).to(torch.float32) for x in (angle.cos(), angle.sin()))
            cos, sin = cos.to(torch.float64)[:, None], sin.to(torch.float64)[:, None]
            first, second = (v[..., : size // 2], v[..., size // 2 :]) if turn == "halves" else (v[..., 0::2], v[..., 1::2])
            step = (lambda y: rounded(y, dtype)) if arithmetic == "every product rounded" else (lambda y: y.to(torch.float32).to(torch.float64))
            low_half, high_half = step(first * cos) - step(second * sin), step(second * cos) + step(first * sin)
            if turn == "halves":
                return torch.cat([low_half, high_half], dim=-1).reshape(shape)
            return torch.stack([low_half, high_half], dim=-1).reshape(shape)

        axes = {
            "rope-table": _table_name(table),
            "positions": positions,
            "rope-theta": scaling or f"{theta:g}",
            "rope-pairs": turn,
            "extra-rounding": arithmetic,
        }
        return Rule(axes, compute)

    for arithmetic in ("one rounding", "every product rounded"):
        for table in _TABLES:
            yield rule(table, arithmetic=arithmetic)
        for positions in list(places)[1:]:
            yield rule(positions=positions, arithmetic=arithmetic)
            yield rule("fp32/fp64/bf16", positions=positions, arithmetic=arithmetic)
        for scaling in scaled:
            yield rule(scaling=scaling, arithmetic=arithmetic)
            yield rule("fp32/fp64/bf16", scaling=scaling, arithmetic=arithmetic)
        for theta in {*thetas, *_THETAS} - {thetas[0]}:
            yield rule(theta=theta, arithmetic=arithmetic)
            yield rule("fp32/fp64/bf16", theta=theta, arithmetic=arithmetic)
        yield rule(turn="neighbours", arithmetic=arithmetic)
