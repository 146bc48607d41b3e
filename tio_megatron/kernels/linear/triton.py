"""The product in Triton: one kernel for plain and grouped products, so one machine code, one matrix instruction, at every number of rows.

A program computes 64 x 128 outputs, rows that are missing masked: decoding one token issues the instruction that prefill does. An output
sees its row, its column and the order of the blocks of 64 terms, which starts anew in every leaf (``paired``: in every half of a leaf); so rows,
columns, batch and the cut of either axis over ranks cannot change a byte. K is never split between programs unless at an aligned node of
eight leaves, which the tree joins either way.

Operands are bf16. A gradient that is fp32 (that of logits) is taken as three bf16 parts, high, middle and low, whose sum it is exactly; in each block
low comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract import FAMILIES
from tio_megatron.kernels import triton_family
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.math.triton import tree_add
from tio_megatron.kernels.operands import require
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

ORDER = FAMILIES["triton-sm90"].order
ROWS, COLUMNS, TERMS = int(ORDER["rows"]), int(ORDER["columns"]), int(ORDER["k_block"])
NODE = 8
"""Leaves that one program joins in registers. On an NPU each leaf is a program of its own, since its compiler cannot move a waiting tile inside the
cube's buffers; ``tree_add`` joins them then, by the same tree."""
OPTIONS = {**TWO_ROUNDINGS, "num_warps": 8, "num_stages": 3}


@triton.jit
def _part(a, b, row, row_stop, column, n, k, k_stop, a_row, a_col, b_row, b_col, acc, THREE: tl.constexpr, TERMS: tl.constexpr):
    """``acc`` plus the terms ``[k, k_stop)``, blocks of TERMS ascending from ``k``."""
    for start in range(k, k_stop, TERMS):
        term = start + tl.arange(0, TERMS)
        left = tl.load(
            a + row[:, None].to(tl.int64) * a_row + term[None, :].to(tl.int64) * a_col,
            mask=(row[:, None] < row_stop) & (term[None, :] < k_stop),
            other=0.0,
        )
        right = tl.load(
            b + term[:, None].to(tl.int64) * b_col + column[None, :].to(tl.int64) * b_row, mask=(term[:, None] < k_stop) & (column[None, :] < n), other=0.0
        )
        if THREE:
            high = left.to(tl.bfloat16)
            rest = left - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low, right, acc)
            acc = tl.dot(middle, right, acc)
            acc = tl.dot(high, right, acc)
        else:
            acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def _product(
    a,
    b,
    places,
    offsets,
    y,
    n,
    length,
    half,
    leaves,
    a_row,
    a_col,
    b_row,
    b_col,
    y_node,
    experts,
    HELD: tl.constexpr,
    PAIRED: tl.constexpr,
    THREE: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """One tile of one node of ``y[nodes, rows, n]``.

    ``length`` terms of a leaf (of half a leaf if PAIRED, the other ``half`` terms further on); HELD leaves of a node, a power of two up to 8.
    ``offsets[0 .. experts]``: rows of expert e; ``places[e]``: where its weight lies, in elements from ``b``.
    """
    tile = tl.program_id(0)
    if GROUPED:
        e = tl.arange(0, EXPERTS)
        lo = tl.load(offsets + e, mask=e < experts, other=0)
        hi = tl.load(offsets + e + 1, mask=e < experts, other=0)
        ends = tl.cumsum((hi - lo + ROWS - 1) // ROWS, 0)
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        if expert >= experts:
            return
        before = tl.max(tl.where(e < expert, ends, 0), 0)
        row_stop = tl.load(offsets + expert + 1)
        row = tl.load(offsets + expert) + (tile - before) * ROWS + tl.arange(0, ROWS)
        b += tl.load(places + expert)
    else:
        row_stop = tl.load(offsets + 1)
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    node = tl.program_id(2)
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    one = value  # the walk's stack: a leaf, a pair, four that wait for their right neighbour
    two = value
    four = value
    for leaf in range(HELD):
        number = node * HELD + leaf
        start = number * length
        value = tl.zeros([ROWS, COLUMNS], tl.float32)
        stop = tl.where(number < leaves, start + length, start)
        value = _part(a, b, row, row_stop, column, n, start, stop, a_row, a_col, b_row, b_col, value, THREE, TERMS)
        if PAIRED:
            value = _part(a, b, row, row_stop, column, n, half + start, half + stop, a_row, a_col, b_row, b_col, value, THREE, TERMS)
        if HELD > 1:
            value = tl.where(number < leaves, value, m.absent())
            if leaf % 2 == 0:
                one = value
            else:
                value = one + value
                if HELD > 2:
                    if leaf % 4 == 1:
                        two = value
                    else:
                        value = two + value
                        if HELD > 4:
                            if leaf == 3:
                                four = value
                            else:
                                value = four + value
    at = y + node.to(tl.int64) * y_node + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=(row[:, None] < row_stop) & (column[None, :] < n))


def product(a: Tensor, weights: Sequence[Tensor], offsets: Tensor | None, leaves: int, paired: bool, out_dtype: torch.dtype, what: str = "matmul") -> Tensor:
    """Rows ``offsets[e]`` to ``offsets[e + 1]`` of ``a[R, K]`` times ``weights[e]`` ``[N, K]`` (None: one weight, all rows): ``[R, N]``.

    Raises:
        ValueError: an fp32 weight, or weights of different strides.
    """
    first = weights[0]
    require(first.dtype == torch.bfloat16, what, f"the weight is {first.dtype}; this kernel family multiplies torch.bfloat16 (the fp32 accuracy mode is cpu's)")
    require(all(w.stride() == first.stride() for w in weights), what, f"weights lie differently: strides {sorted({w.stride() for w in weights})}")
    (rows, k), n = a.shape, first.shape[0]
    if not (rows and n and k):
        return a.new_zeros(rows, n, dtype=out_dtype)
    held = min(1 if triton_family.small(a.device.type) else NODE, triton.next_power_of_2(leaves))
    nodes = triton.cdiv(leaves, held)
    y = a.new_empty(nodes, rows, n, dtype=torch.float32 if nodes > 1 else out_dtype)
    tiles = triton.cdiv(rows, ROWS) + (len(weights) if offsets is not None else 0)
    _product[(tiles, triton.cdiv(n, COLUMNS), nodes)](
        a,
        first,
        _places(a.device, tuple((w.data_ptr() - first.data_ptr()) // first.element_size() for w in weights)),
        _whole(a.device, rows) if offsets is None else offsets.contiguous(),
        y,
        n,
        k // leaves >> paired,
        k >> 1,
        leaves,
        *a.stride(),
        *first.stride(),
        rows * n,
        len(weights),
        HELD=held,
        PAIRED=paired,
        THREE=a.dtype == torch.float32,
        GROUPED=offsets is not None,
        EXPERTS=triton.next_power_of_2(len(weights)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TERMS=TERMS,
        **OPTIONS,
    )
    return y[0] if nodes == 1 else tree_add(y).to(out_dtype)


@functools.lru_cache(maxsize=4096)
def _places(device: torch.device, places: tuple[int, ...]) -> Tensor:
    """Where each expert's weight lies. Kept, so that only the first call copies to the device."""
    return torch.tensor(places, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4096)
def _whole(device: torch.device, rows: int) -> Tensor:
    return torch.tensor([0, rows], dtype=torch.int64, device=device)


def matmul(a: Tensor, b: Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> Tensor:
    """``tio::matmul``: ``a[M, K]`` of bf16 or an fp32 gradient, ``b[N, K]`` bf16, any strides."""
    return product(a, (b,), None, leaves, paired, out_dtype)


def linear_packed(x: Tensor, packed: Tensor, n: int, leaves: int, out_dtype: torch.dtype) -> Tensor:
    """``tio::linear_packed``: on an accelerator a packed weight is ``[N, K]`` itself."""
    return product(x, (packed,), None, leaves, False, out_dtype, "linear")


KERNELS = {"matmul": matmul, "linear_packed": linear_packed}
