"""Router: probabilities of the chosen experts, and why two sides choose others. Legend: r rows, E experts, K chosen, in ascending id."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from tio_megatron.traces.reader import Trace
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.rules import Rule

_NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def routing_rules(case: Case) -> Iterator[Rule]:
    """Axes: where the softmax is, whether and in which order it is normalised, types, scale."""
    logits, ids = case.parent("router_logits"), case.parent("expert_ids")
    if logits is None or ids is None:
        return
    x, ids = logits[case.rows].to(torch.float32), ids[case.rows].to(torch.int64)

    def rule(place: str, normalise: str, logits_type: str = "fp32", output: str = "fp32", inside: str = "fp32") -> Rule:
        def compute() -> torch.Tensor:
            given = x.to(_NARROW[logits_type]).to(torch.float32 if inside == "fp32" else torch.bfloat16)
            chosen = given.gather(1, ids)
            if place == "after top-k":
                p = chosen.softmax(-1)
            elif place == "sigmoid":
                p = chosen.sigmoid()
            else:
                p = given.softmax(-1).gather(1, ids)
            if inside == "bf16 softmax":
                p = p.to(torch.float32)
            if normalise == "by ascending id":
                p = p / _sum(p)
            elif normalise == "by descending probability":
                p = p / _sum(p.sort(-1, descending=True).values)
            elif normalise == "by ascending probability":
                p = p / _sum(p.sort(-1).values)
            elif normalise == "library":
                p = p / p.sum(-1, keepdim=True)
            elif normalise == "reciprocal":
                p = p * (1.0 / p.sum(-1, keepdim=True))
            elif normalise == "fp64":
                p = (p.double() / p.double().sum(-1, keepdim=True)).to(torch.float32)
            return p.to(_NARROW[output])

        kind = "none" if normalise == "none" else "sum is 1"
        types = f"logits {logits_type}, inside {inside}, output {output}"
        axes = {"router-softmax": place, "router-normalise": kind, "router-sum-order": normalise, "router-dtype": types}
        return Rule(axes, compute, frozenset({"router-sum-order"} if normalise == "none" else ()))

    sums = ("library", "by ascending id", "by descending probability", "by ascending probability", "reciprocal", "fp64")
    kinds = (("after top-k", "none"), ("before top-k", "none"), ("sigmoid", "none"), ("sigmoid", "library"))
    for output in _NARROW:
        for logits_type, inside in [*((kind, "fp32") for kind in _NARROW), ("fp32", "bf16 softmax"), ("fp32", "bf16")]:
            for normalise in sums if inside == "fp32" else sums[:1]:
                yield rule("before top-k", normalise, logits_type, output, inside)
            for place, normalise in kinds:
                yield rule(place, normalise, logits_type, output, inside)


def _sum(p: torch.Tensor) -> torch.Tensor:
    total = p[:, :1].clone()
    for k in range(1, p.shape[1]):
        total = total + p[:, k : k + 1]
    return total


def _rounded_scores(logits: torch.Tensor) -> list[torch.Tensor]:
    """What an engine may compare in place of the logits [E]."""
    p, narrow = logits.softmax(-1), logits.to(torch.bfloat16)
    return [narrow, p.to(torch.float32), p.to(torch.bfloat16), narrow.softmax(-1)]


def flips(a: Trace, b: Trace, layer: int, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[str, list[str], str] | None:
    """("tie", "drift" or "router-choice", evidence, side) of the tokens ``rows`` whose experts differ in a layer; None without the tensors.

    The side is the one that takes, for every token, the smaller logits, or of equal ones the higher ids: the contract's rule is the other's.
    """
    held = [(side.values(f"layers.{layer}.router_logits"), side.values(f"layers.{layer}.expert_ids")) for side in (a, b)]
    if any(part is None for pair in held for part in pair):
        return None
    counts = {"tie": 0, "rounded tie": 0, "drift": 0, "router-choice": 0}
    votes: dict[str, set[str]] = {kind: set() for kind in counts}
    shown = ""
    narrowest = ("", float("inf"))
    for row in rows.tolist():
        sides = [(logits[row].flatten().to(torch.float64), set(ids[row].flatten().tolist())) for logits, ids in held if logits is not None and ids is not None]
        (la, chosen_a), (lb, chosen_b) = sides
        beyond = max(chosen_a | chosen_b) + 1 - len(la)  # no expert at all
        la, lb = (F.pad(logits, (0, max(0, beyond)), value=float("-inf")) for logits in (la, lb))
        only_a, only_b = sorted(chosen_a - chosen_b), sorted(chosen_b - chosen_a)
        if not only_a or not only_b:
            continue
        if not torch.equal(la, lb):
            kind = "drift"
            margin = float(la[only_a].min() - la[only_b].max())
            moved = float((la - lb).abs().max())
            if margin < narrowest[1]:
                narrowest = (f"the margin between experts {only_a[0]} and {only_b[0]} is {margin:.3g}, the logits moved by up to {moved:.3g}", margin)
        elif torch.equal(la[only_a].sort().values, la[only_b].sort().values):
            kind = "tie"
        elif any(torch.equal(score[only_a].sort().values, score[only_b].sort().values) for score in _rounded_scores(la)):
            kind = "rounded tie"
        else:
            kind = "router-choice"
        counts[kind] += 1
        ranks = [(la[only].sum().item(), -sum(only)) for only in (only_a, only_b)]
        votes[kind].add("A" if ranks[0] < ranks[1] else "B" if ranks[1] < ranks[0] else "")
        if not shown and kind != "drift":
            sequence, position = a.where(row)
            values = ", ".join(f"expert {expert}: {float(la[expert]):.9g}" for expert in (*only_a, *only_b))
            shown = f"token {position} of sequence {sequence}: A takes {only_a}, B takes {only_b}; logits {values}"
    total = sum(counts.values())
    if not total:
        return None
    kind = max(counts, key=lambda name: counts[name])
    side = "" if kind == "drift" or len(votes[kind]) > 1 else next(iter(votes[kind]))
    said = f"layer {layer}: {total} tokens change experts"
    if kind == "tie":
        return "tie", [f"{said}; the logits of the experts exchanged are equal to the last bit", shown], side
    if kind == "rounded tie":
        return "tie", [f"{said}; the logits of the experts exchanged are equal after rounding (bf16 logits, or probabilities in fp32 or bf16)", shown], side
    if kind == "drift":
        return "drift", [f"{said}, because their logits had drifted", narrowest[0]], ""
    return "router-choice", [f"{said} though their logits are equal and no tie is there: one side does not take the largest logits", shown], side
