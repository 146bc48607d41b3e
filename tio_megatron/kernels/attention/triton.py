"""Attention in Triton: one forward kernel for whole, packed, chunked and paged sequences; the gradients are in ``triton_backward.py``.

The order is ``reference.py``'s: per row and head over blocks of 64 keys counted from position 0 of the sequence, never split between programs,
``l = fl(fl(l * a) + b)``, ``acc = fl(acc * a)``. What differs from the CPU family, because a matrix instruction takes bf16 and lanes work side by
side: the products are the instruction's (scores: the head axis in steps of 16; values: the 64 keys of a block in steps of 16, into the rescaled
accumulator); ``p`` is rounded to bf16 where it multiplies ``v``; ``b``, the sum of the block's fp32 ``p``, is the tree over its 64 places,
masked keys absent.

A program has 64 rows: positions of one sequence with the query heads of one key/value head side by side, so that decoding one token issues
the instruction that prefill does. A row that sees nothing of a block keeps its numbers untouched, so it does not matter which rows lie beside
it. Where keys lie is data: with pages or without, it is the same machine code.

One difference of kind: a NaN or infinity in a *value* behind the causal mask, in the same block of 64 keys, reaches the row, as 0 times it. Keys
past a sequence's end are never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract import FAMILIES
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.attention import triton_backward
from tio_megatron.kernels.operands import dense_last, require
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

ROWS = int(FAMILIES["triton-sm90"].order["query_rows"])
KEYS = FAMILIES["triton-sm90"].fields["kv_block"]
OPTIONS = {**TWO_ROUNDINGS, "num_warps": 8, "num_stages": 2}


@triton.jit(do_not_specialize=["page", "table_row", "paged"])
def _forward(
    q,
    k,
    v,
    o,
    lse,
    starts,
    firsts,
    lengths,
    table,
    scale,
    q_token,
    q_head,
    k_key,
    k_head,
    v_key,
    v_head,
    o_token,
    o_head,
    page_stride,
    page,
    table_row,
    paged,
    sequences,
    heads,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One tile of rows of one sequence and one key/value head (axis 1 of the grid).

    Sequence i has the query tokens ``starts[i]`` to ``starts[i + 1]`` and ``lengths[i]`` keys. Its key j is ``firsts[i] + j`` keys behind ``k``, or (paged)
    ``j % page`` keys inside the page ``table[i, j // page]``.
    """
    sequence, tile = triton_backward.find_tile(starts, sequences, ROWS, GROUP, SEQUENCES)
    if sequence >= sequences:
        return
    g = tl.program_id(1)
    start_q = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - start_q
    keys = tl.load(lengths + sequence)
    first = tl.load(firsts + sequence).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // GROUP, g * GROUP + row % GROUP
    inside = token < tokens
    position = token + (keys - tokens)
    d = tl.arange(0, DEPTH)
    at = (start_q + token).to(tl.int64)
    query = tl.load(q + (at * q_token + head * q_head)[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    key = tl.arange(0, KEYS)
    last = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, tokens - 1) + (keys - tokens)
    for start in range(0, last + 1, KEYS):
        number = tl.load(table + sequence.to(tl.int64) * table_row + start // page, mask=paged != 0, other=0).to(tl.int64)
        base = tl.where(paged != 0, number * page_stride, 0)
        behind = tl.where(paged != 0, start % page, start) + first
        there = start + key < keys
        k_at = base + g * k_head + (behind + key) * k_key
        keyed = tl.load(k + k_at[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
        s = tl.dot(query, keyed) * scale
        visible = (start + key)[None, :] <= position[:, None]
        new = m.larger(top, tl.max(tl.where(visible & (s == s), s, float("-inf")), 1))
        p = m.exp(s - new[:, None])
        block = m.tree_last(tl.where(visible, p, m.absent()), ROWS, KEYS, LEVELS)
        a = m.exp(top - new)
        grown = tl.where(start == 0, acc, acc * a[:, None])
        summed = tl.where(start == 0, block, total * a + block)
        v_at = base + g * v_head + (behind + key) * v_key
        value = tl.load(v + v_at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        grown = tl.dot(tl.where(visible, p, 0.0).to(tl.bfloat16), value, grown)
        live = position >= start
        acc = tl.where(live[:, None], grown, acc)
        total = tl.where(live, summed, total)
        top = tl.where(live, new, top)
    result = tl.div_rn(acc, total[:, None]).to(o.dtype.element_ty)
    tl.store(o + (at * o_token + head * o_head)[:, None] + d[None, :], result, mask=inside[:, None] & (d[None, :] < D))
    tl.store(lse + at * heads + head, top + m.log(total), mask=inside)


@triton.jit
def _write(k, v, cache, slots, k_token, k_head, v_token, v_head, page_stride, page, D: tl.constexpr, DEPTH: tl.constexpr):
    """One key and value of one head. A page of a head is ``[page, 2 D]``: key, then value."""
    token, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    d = tl.arange(0, DEPTH)
    to = cache + slot // page * page_stride + (g * page + slot % page) * 2 * D + d
    tl.store(to, tl.load(k + token * k_token + g * k_head + d, mask=d < D), mask=d < D)
    tl.store(to + D, tl.load(v + token * v_token + g * v_head + d, mask=d < D), mask=d < D)


def _run(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, starts: Tensor, firsts: Tensor, lengths: Tensor, scale: float, groups: int, pages: Tensor | None
) -> None:
    """``k`` and ``v`` ``[keys, G, D]``, or ``[pages, G, page, D]`` with ``pages`` the block table."""
    tokens, heads, size = q.shape
    sequences, group = starts.shape[0] - 1, heads // groups
    key_axis, page = (0, KEYS) if pages is None else (2, k.shape[2])
    table = lengths if pages is None else pages
    if tokens and sequences:
        _forward[(triton.cdiv(tokens * group, ROWS) + sequences, groups)](
            *(q, k, v, o, lse, starts, firsts, lengths, table, scale),
            *(q.stride(0), q.stride(1), k.stride(key_axis), k.stride(1), v.stride(key_axis), v.stride(1), o.stride(0), o.stride(1)),
            *(0 if pages is None else k.stride(0), page, table.stride(0), int(pages is not None), sequences, heads),
            D=size,
            DEPTH=triton.next_power_of_2(size),
            GROUP=group,
            SEQUENCES=triton.next_power_of_2(sequences),
            ROWS=ROWS,
            KEYS=KEYS,
            LEVELS=KEYS.bit_length() - 1,
            **OPTIONS,
        )


def attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``tio::attention``."""
    q, k, v, cu_q, cu_k = dense_last(q), dense_last(k), dense_last(v), *(starts.contiguous().to(q.device, non_blocking=True) for starts in (cu_q, cu_k))
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    _run(q, k, v, o, lse, cu_q, cu_k, cu_k[1:] - cu_k[:-1], scale, k.shape[1], None)
    return o, lse


def write_pages(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """``tio::write_pages``; slots are trusted (looking at them would wait for the device)."""
    k, v, slots = dense_last(k), dense_last(v), slot_mapping.contiguous()
    _, groups, page, width = cache.shape
    if slots.numel():
        strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0), page)
        _write[(slots.numel(), groups)](k, v, cache, slots, *strides, D=width // 2, DEPTH=triton.next_power_of_2(width // 2), num_warps=1)


def attention_paged(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor) -> None:
    """``tio::attention_paged``; lengths and pages are trusted."""
    q, table, starts = dense_last(q), dense_last(block_table), query_start_loc.contiguous()
    require(table.stride(1) == 1, "attention_paged", f"block_table has strides {table.stride()}; its rows must be contiguous")
    size = cache.shape[3] // 2
    k, v = cache[..., :size], cache[..., size:]
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    sequences = starts.shape[0] - 1
    _run(q, k, v, out, lse, starts, torch.zeros_like(starts), seq_lens[:sequences].contiguous(), scale, cache.shape[1], table)


KERNELS = {
    "attention": attention,
    "attention_backward": triton_backward.attention_backward,
    "attention_paged": attention_paged,
    "write_pages": write_pages,
}
