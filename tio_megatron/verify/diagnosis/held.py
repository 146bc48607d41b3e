"""A product that does not follow from the parameter held: does it follow from *any* weights? Only then is it an old copy of them.

Legend: t tokens (or rows of one expert), K inputs, c output columns. What is looked at is the deviation of a side from the exact product, [t, c].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import LOOK
from tio_megatron.verify.diagnosis.products import Product
from tio_megatron.verify.diagnosis.rounding import one_rounding

_FEWEST = 8
"""Tokens below which nothing is said of how a deviation depends on its inputs."""
_MOST = 512
_TOKENS = "Compare what this operator does with the other rows on both sides."
_BIAS = "Look for a bias of this product that the checkpoint has not, or that one side leaves out."


@dataclass(frozen=True)
class Rows:
    """Rows of one parameter: inputs [t, K], exact products and outputs [t, c], fp64."""

    x: torch.Tensor
    exact: torch.Tensor
    out: torch.Tensor

    @property
    def off(self) -> torch.Tensor:
        """[t, c]."""
        return self.out - self.exact


def rows_of(case: Case, made: Product, side: str) -> list[Rows]:
    """All rows of the parameters in use that ``side`` computed, as many as were compared."""
    out = case.sides["AB".index(side)]
    compared = torch.from_numpy(case.compared)
    x = case.input(case.point.parents[0])
    assert x is not None
    found = []
    ids = case.parent("expert_ids") if case.point.op == "expert_product" else None
    for name in made.parameters:
        weight = case.weight(name)
        if weight is None:
            continue
        if ids is None:
            inputs, given = x[compared].flatten(1), out[compared].flatten(1)
        else:
            rows, slots = ((ids == int(name.split(".experts.")[1].split(".")[0])) & compared[:, None]).nonzero(as_tuple=True)
            inputs, given = x[rows, slots] if x.dim() == 3 else x[rows], out[rows, slots]
        inputs, given = inputs[:_MOST].to(torch.float64), given[:_MOST].to(torch.float64)
        columns = torch.linspace(0, len(weight) - 1, min(64, len(weight))).round().to(torch.int64).unique()
        found.append(Rows(inputs, inputs @ weight[columns].to(torch.float64).t(), given[:, columns]))
    return [rows for rows in found if len(rows.x)]


def not_other_weights(held: list[Rows], dtype: torch.dtype) -> tuple[str, str]:
    """Why ``held`` cannot be said to be computed with other weights, and what to look for, in words; ("", "") where it can be said."""
    noise = one_rounding(dtype)
    off, exact = torch.cat([rows.off for rows in held]), torch.cat([rows.exact for rows in held])
    size = exact.square().mean().sqrt().clamp_min(1e-30)
    gap = float(off.square().mean().sqrt() / size)
    if len(off) < _FEWEST:
        return f"it was recorded for {len(off)} rows only: too few to tell other weights from another computation", "Record more tokens."
    moved = float((off.square().mean(-1).sqrt() > 0.1 * off.square().mean().sqrt()).to(torch.float64).mean())
    if moved < 0.9:
        return f"{100 * (1 - moved):.3g}% of the rows follow from the parameter held: other weights would move all of them", _TOKENS
    centre = torch.cat([rows.off - rows.off.mean(0) for rows in held if len(rows.x) > 1] or [off])
    around = float(centre.square().mean().sqrt() / size)
    if around < 0.2 * gap or around < min(noise, 0.7 * gap):  # the vector itself is the larger part of what is off
        return "every row is off by one and the same vector, whatever its inputs are: a bias that the other side lacks", _BIAS
    if _of_the_result(off / size, exact / size, noise, gap):
        return "it is a function of the result, element by element (a soft cap, a clamp)", LOOK
    wide = [rows for rows in held if len(rows.x) >= rows.x.shape[1] + max(4, rows.x.shape[1] // 8)]
    if not wide:
        return _follows_inputs(held), LOOK
    total, count = 0.0, 0
    for rows in wide:
        rest = rows.out - rows.x @ torch.linalg.lstsq(rows.x, rows.out).solution
        total += float(rest.square().sum()) * len(rows.x) / (len(rows.x) - rows.x.shape[1])
        count += rest.numel()
    error = float((total / count) ** 0.5 / size)
    most = min(max((1.3 if dtype == torch.float32 else 0.8) * noise, 0.05 * gap), 0.7 * gap)  # in a narrow type ``noise`` is generous
    return (f"no weights give all rows: the best ones leave {error:.2g} of {gap:.2g} unexplained" if error > most else ""), LOOK


def _of_the_result(off: torch.Tensor, y: torch.Tensor, noise: float, gap: float) -> bool:
    """Whether the deviation is a smooth function of the exact result ``y``, alone."""
    off, y = off.flatten(), y.flatten()
    powers = torch.stack([y, y.square(), y**3, y**5, torch.ones_like(y)], -1)
    left = off - powers @ torch.linalg.lstsq(powers, off[:, None]).solution[:, 0]
    return float(left.square().mean().sqrt()) < max(1.2 * noise if gap > 2 * noise else 0.0, 0.2 * gap)


def _follows_inputs(held: list[Rows]) -> str:
    """With fewer rows than inputs some weights always fit. Rows whose inputs are alike are then off alike, which a cast of the inputs does not do."""
    pairs = []
    for rows in held:
        x, off = (part / part.norm(dim=-1, keepdim=True).clamp_min(1e-30) for part in (rows.x, rows.off))
        first, second = torch.triu_indices(len(x), len(x), 1)
        pairs.append(torch.stack([(x @ x.t())[first, second], (off @ off.t())[first, second]]))
    alike = torch.cat(pairs, -1)
    alike = alike[:, alike[0] < 1 - 1e-9]  # the same token again says nothing
    count = alike.shape[1]
    if count < 10:
        return "too few rows share a parameter to tell other weights from another computation"
    centred = alike - alike.mean(-1, keepdim=True)
    correlation = float((centred[0] * centred[1]).sum() / (centred[0].norm() * centred[1].norm()).clamp_min(1e-30))
    if correlation < max(0.15, 3 / count**0.5):
        return f"rows with like inputs are not off alike (correlation {correlation:.2g} of {count} pairs), as they are with other weights"
    return ""
