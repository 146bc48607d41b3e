"""Sums in the contract's order with plain torch: what every reference is made of. Slow, exact, the same on any machine.

Fused multiply-add is one rounding of ``a * b + c``. torch has none, so it is built here: the product of two fp32 numbers is exact in
float64; the sum's own rounding error is recovered (TwoSum) and folded into the last bit (round to odd), after which rounding to
fp32 gives what one rounding of the exact value would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.contract import ReductionTree
from tio_megatron.contract.families import FAMILIES

CHAIN = FAMILIES["cpu"].fields["chain"]
"""Terms of one chain inside a leaf of a product."""
ROW_CHAIN = FAMILIES["cpu"].fields["row_chain"]
"""Terms of one chain in a sum along a row or over rows (norm, gradient of a probability): one long chain errs more than torch does."""
ROUTER_CHAIN = FAMILIES["cpu"].fields["router_chain"]
"""The same for the router's sum over experts."""


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors (broadcast) with one rounding, subnormals and signed zeros included.

    >>> a = torch.tensor([1 + 2.0**-12]); fma(a, a, torch.tensor([-1.0 - 2.0**-11])).item() == 2.0**-24
    True
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (error != 0) & total.isfinite() & (bits & 1 == 0)
    outward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + outward, bits).view(torch.float64).float()


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root. torch's own is not: about a fifth of its results are one unit off."""
    return x.double().sqrt().float()


def chain_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last axis of ``a * b``: one fma chain from +0, ascending. Leading axes broadcast."""
    a, b = a.float(), b.float()
    total = torch.zeros(torch.broadcast_shapes(a.shape[:-1], b.shape[:-1]), dtype=torch.float32)
    for k in range(a.shape[-1]):
        total = fma(a[..., k], b[..., k], total)
    return total


def chain_sum(x: Tensor) -> Tensor:
    """Sum over the last axis: additions from +0, ascending."""
    total = torch.zeros(x.shape[:-1], dtype=torch.float32)
    for k in range(x.shape[-1]):
        total = total + x[..., k]
    return total


def tree_sum(parts: Tensor) -> Tensor:
    """Sum over the first axis by :class:`ReductionTree`."""
    return ReductionTree(parts.shape[0]).reduce(list(parts))


def leaf_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last axis of ``a * b`` inside one leaf of a product: fma chains of 256 terms, joined by the tree."""
    return _chained_dot(a, b, CHAIN)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last axis of ``a * b`` along a row: fma chains of 32 terms, joined by the tree."""
    return _chained_dot(a, b, ROW_CHAIN)


def _chained_dot(a: Tensor, b: Tensor, chain: int) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    return tree_sum(torch.stack([chain_dot(x, y) for x, y in zip(a.split(chain, -1), b.split(chain, -1), strict=True)]))


def chained_sum(x: Tensor, chain: int) -> Tensor:
    """Sum over the last axis: chains of ``chain`` additions, joined by the tree."""
    return tree_sum(torch.stack([chain_sum(part) for part in x.split(chain, -1)]))
