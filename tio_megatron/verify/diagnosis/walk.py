"""``diagnose``: walks two traces in the order of computation, stops at the first point that differs, and asks why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tio_megatron.traces.reader import Trace, Unfinished
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.combine import combined_from
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.parameters import differing, explain_parameter
from tio_megatron.verify.diagnosis.reasons import why
from tio_megatron.verify.diagnosis.router_rules import flips
from tio_megatron.verify.diagnosis.sides import with_reason
from tio_megatron.verify.diagnosis.unfinished import stopped
from tio_megatron.verify.diagnosis.unseen import one_sided

_RECORD_AGAIN = "Record that side again: its trace is damaged (a full disk, a copy cut short), or its recorder lost tokens."


def diagnose(a: Trace | Unfinished, b: Trace | Unfinished) -> Finding:
    """The first difference between two traces, and its cause.

    Raises:
        ValueError: they are about different tokens or differently built models, so that nothing can be compared.
    """
    if isinstance(a, Unfinished) or isinstance(b, Unfinished):
        return with_reason(stopped(a, b))
    _require_comparable(a, b)
    return with_reason(_walk(a, b))


def _walk(a: Trace, b: Trace) -> Finding:
    graph = a.graph + [point for point in b.graph if point.name not in {known.name for known in a.graph}]
    compared = rows_compared = rows_recorded = 0
    for point in graph:
        if point.name not in a.recorded or point.name not in b.recorded:
            continue
        shapes = [side.recorded[point.name]["shape"] for side in (a, b)]
        columns = (a.columns(point.name), b.columns(point.name))
        both = (columns[0] > 0) & (columns[1] > 0)
        compared += bool(both.any())
        rows_compared += int(both.sum())
        rows_recorded += int(((columns[0] > 0) | (columns[1] > 0)).sum())
        if shapes[0] != shapes[1]:
            if both.any():
                text = f"rows of {shapes[0]} in A and of {shapes[1]} in B"
                return Finding("framework", "shape", point.name, point.layer, int(both.sum()), compared, evidence=(text,), cure=CURES["shape"])
            continue
        differs = both & ((a.digests(point.name) != b.digests(point.name)) | (columns[0] != columns[1]))
        if differs.any():
            case = Case(a, b, point, differs, both, {known.name: known for known in graph})
            found = why(case)
            rows = np.flatnonzero(differs)
            noted = _notes(case)
            found = replace(found, point=point.name, layer=point.layer, rows=len(rows), compared=compared, first=a.where(int(rows[0])), routing=_routing(a, b))
            return found.noting(*noted)
    gaps = one_sided(a, b, graph)
    unused = differing(a, b, sorted(a.weights.keys() | b.weights.keys()))
    if unused:
        found = replace(explain_parameter(a, b, unused[0]), compared=compared)
        return found.noting(f"{len(unused)} parameters differ, but no recorded point does: no token used them")
    counted = f"compared: {rows_compared} of {rows_recorded} rows (tokens at points) that either side recorded at these points"
    evidence = (*([counted] if compared else []), *gaps[:4])
    return Finding("equal", compared=compared, one_sided=len(gaps), evidence=evidence, cure=_RECORD_AGAIN if gaps else "")


def _require_comparable(a: Trace, b: Trace) -> None:
    if len(a.lengths) != len(b.lengths):
        raise ValueError(f"the traces are about different tokens: {len(a.lengths)} sequences in A, {len(b.lengths)} in B")
    for index, (x, y) in enumerate(zip(a.lengths, b.lengths, strict=True)):
        if x != y:
            raise ValueError(f"the traces are about different tokens: sequence {index} has {x} in A and {y} in B")
    if (a.tokens != b.tokens).any():
        row = int(np.argmax(a.tokens != b.tokens))
        sequence, position = a.where(row)
        raise ValueError(f"the traces are about different tokens: token {position} of sequence {sequence} is {a.tokens[row]} in A and {b.tokens[row]} in B")
    for name in ("layers", "moe", "hidden", "head_dim", "experts", "top_k"):
        sizes = a.shape.get(name), b.shape.get(name)
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(f"the traces are of different models: {name} is {sizes[0]} in A and {sizes[1]} in B")


def _routing(a: Trace, b: Trace) -> tuple[str, ...]:
    said = []
    for layer in range(int(a.shape["layers"])):
        name = f"layers.{layer}.expert_ids"
        if name not in a.recorded or name not in b.recorded:
            continue
        both = (a.columns(name) > 0) & (b.columns(name) > 0)
        rows = np.flatnonzero(both & (a.digests(name) != b.digests(name)))
        if len(rows):
            found = flips(a, b, layer, rows[:256])
            said.append(
                found[1][0] + (f" ({found[0]}); {found[1][1]}" if found[1][1] else "") if found else f"layer {layer}: {len(rows)} tokens change experts"
            )
    return tuple(said[:8])


def _notes(case: Case) -> list[str]:
    said = []
    others = sorted((case.a.weights.keys() | case.b.weights.keys()) - set(case.parameters))
    if behind := differing(case.a, case.b, others):
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        said.append(f"recorded parameters that differ too, used elsewhere: {', '.join(behind[:3])}{more}")
    types = [side.recorded[case.point.name]["dtype"] for side in (case.a, case.b)]
    if types[0] != types[1]:
        said.append(f"recorded as {types[0]} in A and {types[1]} in B")
    for name in ("training", "temperature"):
        values = [side.facts.get(name) for side in (case.a, case.b)]
        if values[0] != values[1] and None not in values:
            said.append(f"{name}: {values[0]} in A, {values[1]} in B")
    parents = combined_from(case) if case.point.op == "combine" else [parent for parent in case.point.parents if parent != "positions"]
    missing = [parent for parent in parents if not (parent in case.a.recorded and parent in case.b.recorded)]
    if missing:
        said.append(f"not recorded on both sides, so the difference may begin there: {', '.join(missing)}")
    return said
