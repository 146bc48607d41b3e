"""exp, log and the tree's sum in Triton: elementwise, and the bytes of ``reference.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 1024
LEAVES = 8
"""Leaves that one pass joins: an aligned node of the tree."""


@triton.jit
def _elementwise(x, y, n, LOG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    value = tl.load(x + at, mask=here, other=1.0)
    if LOG:
        result = m.log(value)
    else:
        result = m.exp(value)
    tl.store(y + at, result, mask=here)


@triton.jit
def _fold(parts, y, count, n, BLOCK: tl.constexpr):
    """``y[g]`` is the node of the leaves ``8 g`` to ``8 g + 8`` of ``parts[count, n]``; absent leaves are skipped."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * 8
    here = at < n
    for leaf in tl.static_range(8):
        value = tl.load(parts + (first + leaf) * n + at, mask=here & (first + leaf < count), other=m.absent())
        # The tree's walk: an odd leaf joins its neighbour, a pair its neighbouring pair.
        if leaf % 2 == 0:
            one = value
        else:
            value = one + value
            if leaf % 4 == 1:
                two = value
            else:
                value = two + value
                if leaf == 3:
                    four = value
                else:
                    value = four + value
    tl.store(y + tl.program_id(1).to(tl.int64) * n + at, value, mask=here)


def tree_add(parts: Tensor) -> Tensor:
    """``parts[P, ...]`` fp32 summed over the first axis by the tree over P, eight leaves a pass."""
    parts = parts.contiguous()
    n = parts[0].numel()
    while parts.shape[0] > 1 and n:
        groups = triton.cdiv(parts.shape[0], LEAVES)
        joined = parts.new_empty(groups, *parts.shape[1:])
        _fold[(triton.cdiv(n, BLOCK), groups)](parts, joined, parts.shape[0], n, BLOCK=BLOCK, **TWO_ROUNDINGS)
        parts = joined
    return parts[0].clone() if n else parts.new_empty(parts.shape[1:])


def _apply(x: Tensor, is_log: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _elementwise[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), LOG=is_log, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return y


KERNELS = {"exp": lambda x: _apply(x, False), "log": lambda x: _apply(x, True), "tree_add": tree_add}
