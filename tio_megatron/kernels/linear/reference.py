"""The matrix product's definition in plain torch: slow, and what every kernel must equal byte for byte.

Shapes: ``M`` rows, ``N`` outputs, ``K`` terms. ``y[m, n]`` = the tree over leaves of the tree over chains of at most 256 terms, each chain
an ascending fused multiply-add from +0; fp32 throughout, one rounding to the output dtype.
"""

from __future__ import annotations

import torch

from tio_megatron.contract import ReductionTree

CHAIN = 256


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` with one rounding to fp32, for fp32 tensors.

    The product is exact in float64. The sum is rounded to float64 *to odd* (away from the tie a second rounding could fall on), so
    that rounding it to fp32 gives the correctly rounded result.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float64)
    inexact = total.isfinite() & (error != 0) & (bits & 1 == 0)
    return torch.where(inexact, torch.nextafter(total, towards), total).float()


def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One chain: ``[M, k]`` and ``[N, k]`` to ``[M, N]``, from +0, ascending."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32)
    for k in range(a.shape[1]):
        total = fma(a[:, k, None], b[None, :, k], total)
    return total


def leaf(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One leaf: its chains joined by the tree."""
    parts = [chain(x, y) for x, y in zip(a.split(CHAIN, 1), b.split(CHAIN, 1), strict=True)]
    return ReductionTree(len(parts)).reduce(parts)


def matmul(a: torch.Tensor, b: torch.Tensor, leaves: int = 1, out_dtype: torch.dtype = torch.float32, paired: bool = False) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T`` in the contract's order.

    ``paired``: the ``K`` axis is two halves ``[gate; up]``, and leaf ``j`` is leaf ``j`` of gate followed by leaf ``j`` of up.

    Raises:
        ValueError: ``K``, or with ``paired`` half of it, does not divide into ``leaves``.
    """
    terms = a.shape[1]
    if terms % (leaves << paired):
        raise ValueError(f"{terms} terms do not divide into {leaves} equal leaves")
    if not terms:
        return torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    if paired:
        order = torch.arange(terms).view(2, leaves, -1).transpose(0, 1).flatten()
        a, b = a[:, order], b[:, order]
    length = terms // leaves
    parts = [leaf(x, y) for x, y in zip(a.float().split(length, 1), b.float().split(length, 1), strict=True)]
    return ReductionTree(leaves).reduce(parts).to(out_dtype)
