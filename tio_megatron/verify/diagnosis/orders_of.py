"""Operator order: does a difference look like rounding, which order did each side use, and what does the order depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding
from tio_megatron.verify.diagnosis.orders import Found, product_orders, search
from tio_megatron.verify.diagnosis.products import Product


def product_order(case: Case, made: Product, narrow: bool = False) -> tuple[Found, Found]:
    """Which order each side used for a matrix product; ``narrow``: bf16 partial sums are tried in an fp32 model too."""
    low = narrow_type(case) or (torch.bfloat16 if narrow else None)
    return search(product_orders(made.terms, made.columns, made.width, low), made.a, made.b, passes_of(case, made.rows))


def order_finding(case: Case, found: tuple[Found, Found] | None, evidence: list[str]) -> Finding:
    """The finding: what the order depends on decides its cause."""
    cause, said = _dependence(case, found)
    details: dict[str, Any] = {}
    lines = [*evidence, *said]
    if found:
        for name, way in zip("ab", found, strict=True):
            details[f"order_{name}"], details[f"details_{name}"], details[f"same_bytes_{name}"] = way.name, way.details, way.others
            more = f" ({way.ambiguous} other known orders give the same bytes)" if way.ambiguous else ""
            lines.append(f"{name.upper()}: {way.name}{more}" if way.name else f"{name.upper()}: no known order gives these bytes")
        if not any(way.name for way in found):
            lines.append(
                "the pieces inside a vendor's kernel are not known here; that it is the order follows from equal inputs and a difference below one rounding"
            )
    side = ""
    if found and cause in ("order-by-owner", "order-by-size"):
        side = "A" if found[0].varies and not found[1].varies else "B" if found[1].varies and not found[0].varies else ""
    return Finding("order", cause, side=side, details=details, evidence=tuple(lines), cure=CURES[cause])


def _dependence(case: Case, found: tuple[Found, Found] | None) -> tuple[str, list[str]]:
    varies = {side.varies for side in found or ()}
    a, b = case.a.passes["batch"], case.b.passes["batch"]
    differs, same = case.differs, case.compared & ~case.differs
    if "token" in varies:
        return "order-by-owner", ["the sum of each token starts at a rank that depends on the token"]
    if "size" in varies or "call" in varies:
        return "order-by-size", ["one side changes its order from pass to pass"]
    if (a[case.compared] == b[case.compared]).all():
        if same.any() and (a[differs].min() > a[same].max() or a[differs].max() < a[same].min()):
            large = "larger" if a[differs].min() > a[same].max() else "smaller"
            text = f"only tokens in {large} passes differ ({sorted(set(a[differs].tolist()))[:4]} tokens; passes of {sorted(set(a[same].tolist()))[:4]} agree)"
            return "order-by-size", [text]
        return "order", []
    others = a[differs] != b[differs]
    layouts = [side.facts.get("layout") for side in (case.a, case.b)]
    if others.all() and (layouts[0] == layouts[1] or not _follows_layout(case, found, layouts)):
        sizes = [sorted(set(x[differs].tolist())) for x in (a, b)]
        text = f"A computed these tokens in passes of {_few(sizes[0])} tokens, B in passes of {_few(sizes[1])}; nothing else that is recorded differs"
        return "order-by-batch", [text]
    return "order", []


_ROW_PARALLEL = ("o_proj", "expert_out", "expert_scaled_out", "mlp_out")
"""Points whose sum a layout cuts; those of all others no layout can reorder."""


def _follows_layout(case: Case, found: tuple[Found, Found] | None, layouts: list[Any]) -> bool:
    """Whether another layout may be why the orders differ: the sum is one that ranks cut, and a side's pieces are as many as its ranks (or not known)."""
    if case.point.part not in _ROW_PARALLEL:
        return False
    if found is None or not all(side.name for side in found):
        return True
    ranks = [set(layout.values()) if isinstance(layout, dict) else set() for layout in layouts]
    cut = [side.details.get("pieces", side.details.get("owners", 1)) for side in found]
    return any(pieces > 1 and pieces in sizes for pieces, sizes in zip(cut, ranks, strict=True))


def _few(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:4])) + (" ..." if len(sizes) > 4 else "")


def passes_of(case: Case, rows: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """Per row of each side the size of the pass that computed it, for :func:`search`."""
    at = rows.numpy()
    return {"batch_a": case.a.passes["batch"][at], "batch_b": case.b.passes["batch"][at]}


def narrow_type(case: Case) -> torch.dtype | None:
    """The narrow type in which partial sums may be kept: the model's, None where all of it is fp32."""
    types = {str(entry.get("dtype")) for side in (case.a, case.b) for entry in side.recorded.values()}
    return torch.bfloat16 if "bfloat16" in types else torch.float16 if "float16" in types else None
