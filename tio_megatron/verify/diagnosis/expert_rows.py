"""Rows of experts that one side never computed, left zero, or took from another token."""

from __future__ import annotations

import numpy as np
import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.combine import recorded
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.elementwise_rules import scaling_rules, swiglu_rules
from tio_megatron.verify.diagnosis.faults import garbage
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.products import product_of
from tio_megatron.verify.diagnosis.rounding import looks_like_rounding
from tio_megatron.verify.diagnosis.rules import relative


def lost_or_moved(case: Case) -> Finding | None:
    """The finding, or None where the rows are neither lost nor another token's."""
    if not case.point.part.startswith("expert_") and case.point.op != "combine":
        return None
    padding = [side.passes["padding"] for side in (case.a, case.b)]
    rows = np.flatnonzero(case.differs)
    padded = [bool((held[rows] > 0).any()) for held in padding]
    routed = [int(side.facts.get("padding_routed", 0) or 0) for side in (case.a, case.b)]
    columns = [side.columns(case.point.name) for side in (case.a, case.b)]
    for label, mine, other in (("A", columns[0], columns[1]), ("B", columns[1], columns[0])):
        fewer = np.flatnonzero((mine < other) & case.differs)
        if len(fewer):
            return _lost(
                label, f"{len(fewer)} tokens lack some of their experts in {label}", case.names(fewer), padded["AB".index(label)], routed["AB".index(label)]
            )
    if not case.kept:
        return None
    sides = case.sides
    if case.point.part == "expert_ids" or case.point.part == "expert_probs":
        return None
    slots = [side.reshape(len(side), -1, side.shape[-1]) if case.point.op != "combine" else side[:, None] for side in sides]
    changed = (slots[0] != slots[1]).any(-1)
    if case.point.op == "combine" and case.parent("expert_out") is not None and (slots[0][changed] == 0).all() != (slots[1][changed] == 0).all():
        return garbage(case)  # the experts' rows are there, equal on both sides, and their sum is zero
    for label, i in (("A", 0), ("B", 1)):
        zero = changed & (slots[i] == 0).all(-1) & (slots[1 - i] != 0).any(-1)
        if bool(zero.any()) and int(zero.sum()) >= 0.5 * int(changed.sum()):
            lost = zero.any(-1).nonzero()[:, 0].numpy()
            return _lost(label, f"{int(zero.sum())} rows of experts are zero in {label}", case.names(lost), padded[i], routed[i])
    moved = {label: said for label, i in (("A", 0), ("B", 1)) if (said := _of_others(label, slots[i][changed], slots[1 - i]))}
    if not moved:
        return None
    # Of rows that changed places each side holds the other's: what they are made of tells, or padding.
    holding = [label for label, i in (("A", 0), ("B", 1)) if padded[i] or routed[i]]
    side = next(iter(moved)) if len(moved) == 1 else _not_following(case) or (holding[0] if len(holding) == 1 else "")
    said = moved.get(side) or next(iter(moved.values()))
    if side in holding:
        return _lost(side, said, case.names(rows), True, routed["AB".index(side)])
    return Finding("framework", "moved-rows", side=side, evidence=(said, case.names(rows)), cure=CURES["moved-rows"])


def _lost(side: str, said: str, names: str, padded: bool, routed: int) -> Finding:
    if padded or routed:
        more = f"{side}'s passes hold padding tokens" + (f", {routed} of which were routed" if routed else "")
        return Finding("framework", "padding", side=side, evidence=(said, names, more), cure=CURES["padding"])
    return Finding("framework", "dropped-tokens", side=side, evidence=(said, names), cure=CURES["dropped-tokens"])


def _of_others(label: str, rows: torch.Tensor, others: torch.Tensor) -> str:
    """In words, that most of ``rows`` [n, c] of a side are rows of ``others`` [T, K, c], of the other side; "" where they are not."""
    first, everything = rows[:64], others.reshape(-1, others.shape[-1])
    taken = sum(bool((everything == row).all(-1).any()) for row in first)
    if not taken or taken < 0.5 * len(first) or not bool((rows != 0).any()):
        return ""
    return f"{taken} of the first {len(first)} rows that differ in {label} belong, byte for byte, to other tokens: rows were moved"


def _not_following(case: Case) -> str:
    """The side whose rows are not what the usual formula makes of the recorded inputs and parameters, where the other side's are; "" where nothing tells."""
    a, b = (side[case.rows] for side in case.sides)
    if case.point.op == "expert_product":
        made = product_of(case)
        usual, a, b = (made.exact(), made.a, made.b) if made else (None, a, b)
    elif case.point.op == "combine":
        rows = recorded(case)
        usual = (rows.out * rows.weights[..., None]).sum(1) if rows else None
    else:
        rule = next(iter(swiglu_rules(case) if case.point.op == "swiglu" else scaling_rules(case)), None)
        usual = rule.compute() if rule else None
    if usual is None or usual.shape != a.shape:
        return ""
    follows = [looks_like_rounding(relative(usual.to(side.dtype), side), side.dtype) for side in (a, b)]
    return "AB"[follows.index(False)] if sum(follows) == 1 else ""
