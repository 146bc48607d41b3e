"""Which order of adding each side used: known orders are tried on recorded terms until one gives the recorded bytes.

An order is a way to make ``n`` partial sums (pieces of the K terms, each added exactly and rounded once, or by a chain of fused multiply-adds) and
a way to join them. Legend: r rows, c columns, K terms, n pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

REPRODUCED = 0.995
"""Part of a row's elements that an order must give byte for byte."""

NEARLY = 0.9
"""The same of each row, where all rows together reach REPRODUCED: partial sums in a narrow type flip where the terms are not exact in fp64."""

_SHOWN = 200
"""Names of orders with the same bytes that are passed on."""


@dataclass(frozen=True)
class Order:
    """A way of adding, in words and as ``details``; ``values`` [r, c] fp32 are what it gives. ``start`` >= 0: a ring that starts at this piece."""

    name: str
    details: dict[str, Any]
    values: torch.Tensor
    start: int = -1
    family: str = ""


@dataclass
class Found:
    """What was found for one side: ``name`` in words ("" if nothing reproduces it), ``details``, and a note on how it varies over rows.

    ``ambiguous``: how many further orders give the same bytes; ``others`` some of their names.
    """

    name: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    varies: str = ""
    ambiguous: int = 0
    others: list[str] = field(default_factory=list)
    by_row: list[str] = field(default_factory=list)


def _fp32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.float64)


Step = Callable[[torch.Tensor], torch.Tensor]


def _steps(low: torch.dtype | None) -> dict[str, tuple[Step, Step]]:
    """How a partial sum and how a running sum are rounded; ``low``: a narrow type that may be in it."""
    found: dict[str, tuple[Step, Step]] = {"fp32": (_fp32, _fp32)}
    if low is not None:
        name = _short(low)

        def narrow(x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32).to(low).to(torch.float64)

        found |= {f"{name} partials, fp32 sums": (narrow, _fp32), name: (narrow, narrow)}
    return found


def _short(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp16"


def cuts_of(k: int) -> dict[int, list[tuple[int, int, str]]]:
    """{pieces: [(first, stop, kind)]} for every sensible number of pieces: equal, ceil-sized (the last is shorter), or sizes that differ by one."""
    found: dict[Any, list[tuple[int, int, str]]] = {}
    for n in [*range(2, min(k, 64) + 1), *(k // size for size in (1, 2, 4, 8, 16, 32) if k % size == 0 and k // size > 64)]:
        size = -(-k // n)
        ceil = [(at, min(k, at + size), "") for at in range(0, k, size)]
        if len(ceil) == n:
            found[n] = ceil
        if k % n:
            edges = [k // n * i + min(i, k % n) for i in range(n + 1)]
            found[(n, "even")] = [(edges[i], edges[i + 1], "") for i in range(n)]
    return found


def partials(terms: torch.Tensor, cuts: list[tuple[int, int, str]], chain: bool) -> torch.Tensor:
    """[n, r, c] fp64 partial sums: exact, or fused multiply-adds in ascending order with fp32 running sums."""
    if not chain:
        return torch.stack([terms[..., first:stop].sum(-1) for first, stop, _ in cuts])
    longest = max(stop - first for first, stop, _ in cuts)
    padded = torch.zeros(len(cuts), *terms.shape[:-1], longest, dtype=torch.float64)
    for i, (first, stop, _) in enumerate(cuts):
        padded[i, ..., : stop - first] = terms[..., first:stop]
    total = torch.zeros(padded.shape[:-1], dtype=torch.float64)
    for k in range(longest):
        total = _fp32(total + padded[..., k])
    return total


def joined(parts: torch.Tensor, how: str, step: Callable[[torch.Tensor], torch.Tensor], start: int = 0) -> torch.Tensor:
    """The sum of ``parts`` [n, ...] in an order."""
    n = len(parts)
    if how in ("sequential", "backwards", "ring"):
        order = {"sequential": range(n), "backwards": range(n - 1, -1, -1), "ring": [(start + i) % n for i in range(n)]}[how]
        total = step(parts[order[0]])  # a running sum has its type from the start
        for i in list(order)[1:]:
            total = step(total + parts[i])
        return total
    rows = list(parts)
    while len(rows) > 1:
        if how == "pairwise":
            rows = [step(rows[i] + rows[i + 1]) if i + 1 < len(rows) else rows[i] for i in range(0, len(rows), 2)]
        else:
            half = -(-len(rows) // 2)
            rows = [step(rows[i] + rows[i + half]) if i + half < len(rows) else rows[i] for i in range(half)]
    return rows[0]


def product_orders(terms: torch.Tensor, columns: torch.Tensor, width: int, low: torch.dtype | None) -> Iterator[Order]:
    """Orders of a matrix product. ``columns`` [r, c] of ``width`` decide the chunk in a ring all-reduce; ``low``: partial sums in that type are tried."""
    k, steps = terms.shape[-1], _steps(low)
    yield Order("one exact sum, rounded once", {"order": "exact", "pieces": 1}, terms.sum(-1).to(torch.float32))
    for key, cuts in cuts_of(k).items():
        n = len(cuts)
        for chain in (False, True) if not isinstance(key, tuple) and k // n <= 512 and n <= 64 else (False,):
            if chain and n == k:
                continue
            raw = partials(terms, cuts, chain)
            inner = ", each a chain" if chain else ""
            for precision, (part, step) in steps.items() if n <= 64 else list(steps.items())[:1]:
                parts = part(raw)
                for how in ("sequential", "pairwise", "backwards", "halves") if n > 2 else ("sequential",):
                    details = {"order": how, "pieces": n, "partials": precision}
                    yield Order(f"{n} pieces{inner}, {how}, {precision}", details, joined(parts, how, step).to(torch.float32))
                if 2 < n <= 16 and not chain:
                    starts = [joined(parts, "ring", step, start) for start in range(n)]
                    for start in range(1, n):
                        details = {"order": "ring", "pieces": n, "partials": precision, "start": start}
                        yield Order(
                            f"ring over {n} ranks from rank {start}, {precision}", details, starts[start].to(torch.float32), start, f"ring {n} {precision}"
                        )
                    details = {"order": "ring", "pieces": n, "partials": precision, "start": 0}
                    yield Order(f"{n} pieces, sequential, {precision}", details, starts[0].to(torch.float32), 0, f"ring {n} {precision}")
                    chunk = columns // -(-width // n)
                    for shift in range(n):
                        chosen = torch.stack(starts).gather(0, ((chunk + shift) % n)[None])[0]
                        details = {"order": "ring by column chunk", "pieces": n, "partials": precision, "start": shift}
                        yield Order(f"ring all-reduce over {n} ranks, a start for each chunk of columns, {precision}", details, chosen.to(torch.float32))


def combine_orders(out: torch.Tensor, probabilities: torch.Tensor, ids: torch.Tensor, experts: int, low: torch.dtype | None) -> Iterator[Order]:
    """Orders of adding a token's experts: ``out`` [r, K, c], ``probabilities`` [r, K], ``ids`` [r, K] ascending; fp64."""
    r, k, _ = out.shape
    steps = _steps(low)
    running = [(name, step) for name, (part, step) in steps.items() if part is step]
    weighted = {"fp32": _fp32(out * probabilities[..., None])}
    if low is not None and not bool((probabilities == 1).all()):
        name, narrow = running[-1]
        weighted |= {name: narrow(weighted["fp32"]), f"{name} probabilities": _fp32(out * narrow(probabilities)[..., None])}
        weighted[f"{name} probabilities, {name}"] = narrow(out * narrow(probabilities)[..., None])
    permutations = {
        "by ascending id": torch.arange(k).expand(r, k),
        "by descending id": torch.arange(k - 1, -1, -1).expand(r, k),
        "by descending probability": probabilities.argsort(dim=-1, descending=True, stable=True),
        "by ascending probability": probabilities.argsort(dim=-1, stable=True),
    }
    absent = -torch.zeros((), dtype=torch.float64)
    for name, terms in weighted.items():
        for precision, step in running:
            words = f"products {name}, sums {precision}"
            for order, places in permutations.items():
                moved = terms.gather(1, places[..., None].expand_as(terms)).transpose(0, 1)
                yield Order(f"experts {order}, {words}", {"order": order, "partials": precision}, joined(moved, "sequential", step).to(torch.float32))
                if order == "by descending probability" and k > 2:
                    yield Order(
                        f"experts pairwise {order}, {words}",
                        {"order": f"pairwise {order}", "partials": precision},
                        joined(moved, "pairwise", step).to(torch.float32),
                    )
            leaves = torch.full((experts, r, terms.shape[-1]), float(absent), dtype=torch.float64)
            leaves[ids.t().reshape(-1), torch.arange(r).repeat(k)] = terms.transpose(0, 1).reshape(r * k, -1)
            present = torch.zeros(experts, r, dtype=torch.bool)
            present[ids.t().reshape(-1), torch.arange(r).repeat(k)] = True
            yield Order(
                f"balanced tree over the expert axis, {words}", {"order": "tree", "partials": precision}, joined(leaves, "pairwise", step).to(torch.float32)
            )
            yield from _owner_orders(leaves, name, steps, precision)  # owners add their own experts, then send
    if not bool((probabilities == 1).all()):
        for order, places in permutations.items():
            rows, p = out.gather(1, places[..., None].expand_as(out)), probabilities.gather(1, places)[..., None]
            total = _fp32(rows[:, 0] * p[:, 0])
            for at in range(1, k):
                total = _fp32(total + rows[:, at] * p[:, at])
            details = {"order": order, "partials": "fp32", "fused": True}
            yield Order(f"experts {order}, fused multiply-adds, sums fp32", details, total.to(torch.float32))


def _owner_orders(leaves: torch.Tensor, products: str, steps: dict[str, tuple[Step, Step]], inside: str) -> Iterator[Order]:
    """Sums by the ranks that own the experts: ``leaves`` [E, r, c], -0 where an expert is absent; ``inside``: what an owner's running sum is rounded to."""
    experts = len(leaves)
    for ep in (2, 4, 8, 16, 32):
        if ep > experts or experts % ep:
            continue
        groups = leaves.view(ep, experts // ep, *leaves.shape[1:])
        held = torch.stack([joined(group, "sequential", steps[inside][1]) for group in groups])
        for kept, (part, step) in steps.items():
            if inside != "fp32" and kept == "fp32":
                continue  # the same as narrow partials
            parts = part(held)
            said = f"sums of {ep} owners, {kept}, products {products}" + (f", each owner's running sum {inside}" if inside != "fp32" else "")
            yield Order(f"{said}, pairwise", {"order": "pairwise owners", "owners": ep, "partials": kept}, joined(parts, "pairwise", step).to(torch.float32))
            for start in range(ep):
                details = {"order": "ring over owners", "owners": ep, "partials": kept, "start": start}
                yield Order(f"{said}, from owner {start}", details, joined(parts, "ring", step, start).to(torch.float32), start, said)


def search(orders: Iterator[Order], a: torch.Tensor, b: torch.Tensor, passes: dict[str, np.ndarray[Any, Any]]) -> tuple[Found, Found]:
    """Which order gives ``a`` and which ``b`` ([r, c], as recorded). ``passes`` holds per row of each side: "batch_a", "batch_b" [r]."""
    tried: list[Order] = []
    scores: list[list[torch.Tensor]] = [[], []]
    for order in orders:
        tried.append(order)
        for held, side in zip(scores, (a, b), strict=True):
            held.append((order.values.to(side.dtype) == side).to(torch.float64).mean(dim=1))
    found = [_best(tried, torch.stack(held), passes[name]) for held, name in zip(scores, ("batch_a", "batch_b"), strict=True)]
    return found[0], found[1]


def _best(tried: list[Order], scores: torch.Tensor, batch: np.ndarray[Any, Any]) -> Found:
    """``scores`` [orders, r]: part of each row's elements that an order reproduces."""
    whole = scores.mean(dim=1)
    good = (scores >= REPRODUCED).all(dim=1).nonzero()[:, 0].tolist()
    if not good and float(whole.max()) >= REPRODUCED:
        good = [int(whole.argmax())]
    if good:
        return Found(tried[good[0]].name, tried[good[0]].details, "", len(good) - 1, [tried[i].name for i in good[1:_SHOWN]])
    families = sorted({order.family for order in tried if order.family})
    for family in families:  # one ring whose start depends on the token
        members = [i for i, order in enumerate(tried) if order.family == family]
        rows = scores[members]
        if _reproduced(rows.max(dim=0).values):
            starts = [tried[members[int(i)]].start for i in rows.argmax(dim=0)]
            details = {**tried[members[0]].details, "start": "by token", "starts": sorted(set(starts))}
            name = tried[members[0]].name.replace(", sequential", "").replace(f", from owner {tried[members[0]].start}", "")
            return Found(f"{name}, starting at a rank that depends on the token ({sorted(set(starts))})", details, "token")
    sizes = sorted(set(batch.tolist()))
    if len(sizes) > 1:  # one order for small passes, another for large ones
        chosen = []
        for size in sizes:
            here = torch.from_numpy(batch == size)
            fits = [i for i in range(len(tried)) if _reproduced(scores[i, here])]
            chosen.append(tried[fits[0]].name if fits else "")
        if all(chosen):
            return Found("; ".join(f"{name} in passes of {size} tokens" for size, name in zip(sizes, chosen, strict=True)), {"order": "by size"}, "size")
    best = scores.max(dim=0)
    if bool((best.values >= REPRODUCED).all()):
        names = [tried[int(i)].name for i in best.indices]
        if len(set(names)) <= 3:
            return Found(" or ".join(sorted(set(names))), {"order": "changes"}, "call", by_row=names)
    return Found()


def _reproduced(rows: torch.Tensor) -> bool:
    """Whether parts [r] of each row's elements are as many as an order must give."""
    return bool((rows >= NEARLY).all()) and float(rows.mean()) >= REPRODUCED
