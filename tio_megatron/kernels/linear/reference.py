"""The matrix product's definition in plain torch: slow, and what every kernel must equal byte for byte.

Shapes: ``M`` rows, ``N`` outputs, ``K`` terms. ``y[m, n]`` = the tree over leaves of the tree over chains of at most 256 terms, each chain
an ascending fused multiply-add from +0; fp32 throughout, one rounding to the output dtype.
"""

from __future__ import annotations

import torch

from tio_megatron.contract import ReductionTree
from tio_megatron.kernels.exact import CHAIN, chain_dot


def leaf(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One leaf of the product of ``[M, k]`` and ``[N, k]``: ``[M, N]`` fp32."""
    parts = [chain_dot(x[:, None], y[None]) for x, y in zip(a.split(CHAIN, 1), b.split(CHAIN, 1), strict=True)]
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
    parts = [leaf(x, y) for x, y in zip(a.split(length, 1), b.split(length, 1), strict=True)]
    return ReductionTree(leaves).reduce(parts).to(out_dtype)
