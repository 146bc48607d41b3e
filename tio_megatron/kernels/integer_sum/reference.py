"""Exact sums over tokens, defined. ``N`` and ``K`` axes of a weight, ``R`` rows (tokens), ``H`` hidden, ``V`` vocabulary rows.

A partial is an fp32 number: for a weight the product over the rows of one grain, in the product's order (one leaf); for an embedding
or a norm one term. Each is rounded once, half to even, to a multiple of ``2^unit`` and added as an integer. So no sum of partials has an order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.integer_sum.form import IntegerSum
from tio_megatron.kernels.linear.reference import matmul
from tio_megatron.kernels.norm.reference import inverse_rms


def add_partials(total: IntegerSum, partials: Tensor) -> None:
    """Add ``partials``, fp32, of the shape of the sum. float64 holds every product by a power of two here, and ``round`` is half to even."""
    size = partials.double().abs()
    large = ~(size < total.large)
    high = large & (size < total.limit)
    total.low += torch.where(large, 0.0, partials.double() * 2.0**-total.unit).round().to(torch.int64)
    total.high += torch.where(high, partials.double() * 2.0 ** (24 - total.unit - total.split), 0.0).to(torch.int64)
    peak = torch.where(size.isnan(), math.inf, size)
    total.peak.copy_(torch.cat([total.peak.double(), peak.flatten()]).amax(0, keepdim=True))


def add_products(sums: Sequence[IntegerSum], dy: Tensor, x: Tensor, starts: Tensor, of: Tensor, order: Tensor | None = None) -> None:
    """The partials ``dy[rows of a grain].T @ x[rows of a grain]``; a grain without rows has none."""
    bounds = starts.tolist()
    for total, first, last in zip(sums, of.tolist()[:-1], of.tolist()[1:], strict=True):
        for lo, hi in zip(bounds[first:last], bounds[first + 1 : last + 1], strict=True):
            rows = torch.arange(lo, hi) if order is None else order[lo:hi]
            if len(rows):
                add_partials(total, matmul(dy[rows].t(), x[rows].t()))


def add_rows(total: IntegerSum, rows: Tensor, ids: Tensor) -> None:
    """Each element of ``rows[R, H]`` is a partial of row ``ids[r]``."""
    for row, i in zip(rows.float(), ids.tolist(), strict=True):
        add_partials(IntegerSum(total.low[i], total.high[i], total.peak, total.unit, total.split), row)


def add_norm_terms(total: IntegerSum, dy: Tensor, x: Tensor, eps: float) -> None:
    """Each term ``fl(dy * fl(x * inv))`` of an RMSNorm's weight is a partial; ``inv`` is the norm's."""
    terms = dy.float() * (x.float() * inverse_rms(x, eps))
    for row in terms.reshape(-1, terms.shape[-1]):
        add_partials(total, row)


def rounded(count: int, unit: int) -> float:
    """``count * 2^unit`` with one rounding to fp32, half to even: subnormals, infinity, and -0 for a negative number that vanishes."""
    last = max(abs(count).bit_length() + unit - 24, -149)
    size, drop = abs(count), last - unit
    if drop > 0:
        half, rest = 1 << (drop - 1), size & ((1 << drop) - 1)
        size >>= drop
        size += rest > half or (rest == half and size & 1)
    else:
        last = unit
    value = math.ldexp(size, last) if not size or size.bit_length() + last <= 128 else math.inf
    return -value if count < 0 else value


def value(low: Tensor, high: Tensor | None, unit: int, split: int) -> Tensor:
    """``(high * 2^(split - 24) + low) * 2^unit`` as fp32, of the shape of ``low``."""
    highs = [0] * low.numel() if high is None else high.flatten().tolist()
    counts = [(h << (split - 24)) + n for n, h in zip(low.flatten().tolist(), highs, strict=True)]
    return torch.tensor([rounded(count, unit) for count in counts], dtype=torch.float32).view(low.shape)
