"""Dropout of attention's probabilities, seen from outside: each head loses keys of its own, and those left are larger by one factor.

A mask is no such thing: it takes the same keys from every head, and what is left grows by another factor in every row.
"""

from __future__ import annotations

import torch

from tio_megatron.verify.diagnosis.attention_rules import heads_of
from tio_megatron.verify.diagnosis.case import Case
from tio_megatron.verify.diagnosis.cures import CURES
from tio_megatron.verify.diagnosis.finding import Finding

_HEAVY = 0.02
"""Probabilities below this are not solved for well enough to say that they are zero."""


def attention_dropout(case: Case) -> Finding | None:
    """The finding where the probabilities that explain a side are the usual ones, some of them zero, the others larger by one factor."""
    heads = heads_of(case, 48)
    if heads is None:
        return None
    size, usual = heads.q.shape[-1], heads.scores()
    found: dict[str, list[torch.Tensor]] = {"A": [], "B": []}
    for i, row in enumerate(heads.rows.tolist()):
        begin = int(heads.begin[i])
        count = row - begin + 1
        if not 2 <= count <= size // 2:
            continue
        p = usual[i, :, begin : row + 1].softmax(-1)
        values = heads.v[begin : row + 1][:, heads.group()].permute(1, 2, 0)  # [Q, D, n]
        inverse = torch.linalg.pinv(values)
        told = (inverse @ values).diagonal(dim1=-2, dim2=-1) > 1 - 1e-6  # not a key whose value another key has too, as one token twice in layer 0
        for label, side in zip("AB", case.sides, strict=True):
            out = side[row].to(torch.float64).reshape(-1, size, 1)
            ratios = (inverse @ out)[..., 0] / p
            found[label].append(ratios.masked_fill((p <= _HEAVY) | ~told, float("nan")))
    for label, rows in found.items():
        heavy = torch.cat([ratios[~ratios.isnan()] for ratios in rows]) if rows else torch.zeros(0)
        if len(heavy) < 8:
            continue
        zero = heavy.abs() < 0.1
        part, rest = float(zero.double().mean()), heavy[~zero]
        if not 0.01 < part < 0.95 or not len(rest):
            continue
        factor = float(rest.median())
        spread = float((rest / factor - 1).abs().median())
        doubt = 0.03 + 4 * (part * (1 - part) / len(heavy)) ** 0.5
        if factor > 1.01 and abs(part - (1 - 1 / factor)) < doubt and spread < 0.1 and _together(rows) < (1 + part) / 2:
            said = f"in {label}, {100 * part:.3g}% of the attention probabilities are zero and the others are {factor:.4g} times what they should be"
            return Finding("framework", "dropout", side=label, details={"rate": round(part, 3)}, evidence=(said,), cure=CURES["dropout"])
    return None


def _together(rows: list[torch.Tensor]) -> float:
    """How often a key that is zero in one head is zero in another too: as often as any under dropout, always under a mask. ``rows``: [Q, n] each."""
    both = pairs = 0
    for ratios in rows:
        heavy, zero = (~ratios.isnan()).double(), (ratios.abs() < 0.1).double()
        zeros, held = zero.sum(0), heavy.sum(0)
        both += int((zeros * (zeros - 1)).sum())
        pairs += int((zeros * (held - 1)).sum())
    return both / pairs if pairs else 0.0
