"""Gradients of attention in Triton. Probabilities are computed again as ``exp(s - lse)`` and rounded to bf16 where a matrix instruction takes them.

``dq``: one chain over blocks of 64 keys ascending. ``dk`` and ``dv``: one chain over the heads of the group ascending, and for each head over blocks of 64
query positions ascending, counted from position 0 of the sequence. ``delta`` is the tree over the head axis of ``do * o``. No atomics, no parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract import FAMILIES
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.operands import dense_last
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

ROWS = int(FAMILIES["triton-sm90"].order["query_rows"])
KEYS = FAMILIES["triton-sm90"].fields["kv_block"]
OPTIONS = {**TWO_ROUNDINGS, "num_warps": 8, "num_stages": 1}


@triton.jit
def find_tile(starts, sequences, ROWS: tl.constexpr, GROUP: tl.constexpr, SEQUENCES: tl.constexpr):
    """Of program 0's tile: its sequence and its number there. Each sequence has as many tiles as its ``GROUP`` rows a token need."""
    i = tl.arange(0, SEQUENCES)
    lo = tl.load(starts + i, mask=i < sequences, other=0)
    hi = tl.load(starts + i + 1, mask=i < sequences, other=0)
    ends = tl.cumsum(((hi - lo) * GROUP + ROWS - 1) // ROWS, 0)
    tile = tl.program_id(0)
    sequence = tl.sum((ends <= tile).to(tl.int32), 0)
    return tl.where(tile >= tl.max(ends, 0), sequences, sequence), tile - tl.max(tl.where(i < sequence, ends, 0), 0)


@triton.jit
def _probabilities(query, keyed, lse, visible, scale):
    """``exp(s - lse)``, 0 where masked."""
    return tl.where(visible, m.exp(tl.dot(query, keyed) * scale - lse[:, None]), 0.0)


@triton.jit
def _dq(
    do,
    q,
    k,
    v,
    o,
    lse,
    delta,
    dq,
    cu_q,
    cu_k,
    scale,
    do_token,
    do_head,
    q_token,
    q_head,
    k_key,
    k_head,
    v_key,
    v_head,
    o_token,
    o_head,
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
    """``dq`` and ``delta`` of one tile of rows, as the forward's."""
    sequence, tile = find_tile(cu_q, sequences, ROWS, GROUP, SEQUENCES)
    if sequence >= sequences:
        return
    g = tl.program_id(1)
    start_q, start_k = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
    tokens = tl.load(cu_q + sequence + 1) - start_q
    keys = tl.load(cu_k + sequence + 1) - start_k
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // GROUP, g * GROUP + row % GROUP
    inside = token < tokens
    position = token + (keys - tokens)
    d = tl.arange(0, DEPTH)
    at = (start_q + token).to(tl.int64)
    here = inside[:, None] & (d[None, :] < D)
    query = tl.load(q + (at * q_token + head * q_head)[:, None] + d[None, :], mask=here, other=0.0)
    given = tl.load(do + (at * do_token + head * do_head)[:, None] + d[None, :], mask=here, other=0.0)
    out = tl.load(o + (at * o_token + head * o_head)[:, None] + d[None, :], mask=here, other=0.0)
    norm = tl.load(lse + at * heads + head, mask=inside, other=0.0)
    products = tl.where(d[None, :] < D, given.to(tl.float32) * out.to(tl.float32), m.absent())
    mean = m.tree_last(products, ROWS, DEPTH, LEVELS)
    tl.store(delta + at * heads + head, mean, mask=inside)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, tokens - 1) + (keys - tokens)
    for start in range(0, last + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < keys
        k_at = (start_k + key).to(tl.int64) * k_key + g * k_head
        v_at = (start_k + key).to(tl.int64) * v_key + g * v_head
        rows = tl.load(k + k_at[:, None] + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        valued = tl.load(v + v_at[None, :] + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
        visible = key[None, :] <= position[:, None]
        p = _probabilities(query, tl.trans(rows), norm, visible, scale)
        ds = tl.where(visible, p * (tl.dot(given, valued) - mean[:, None]), 0.0)
        grown = tl.dot(ds.to(tl.bfloat16), rows, acc)
        acc = tl.where((position >= start)[:, None], grown, acc)
    tl.store(dq + (at * heads + head)[:, None] * D + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=here)


@triton.jit
def _dkv(
    do,
    q,
    k,
    v,
    lse,
    delta,
    dk,
    dv,
    cu_q,
    cu_k,
    scale,
    do_token,
    do_head,
    q_token,
    q_head,
    k_key,
    k_head,
    v_key,
    v_head,
    sequences,
    heads,
    groups,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``dk`` and ``dv`` of one block of keys of one key/value head."""
    sequence, tile = find_tile(cu_k, sequences, KEYS, 1, SEQUENCES)
    if sequence >= sequences:
        return
    g = tl.program_id(1)
    start_q, start_k = tl.load(cu_q + sequence), tl.load(cu_k + sequence)
    tokens = tl.load(cu_q + sequence + 1) - start_q
    keys = tl.load(cu_k + sequence + 1) - start_k
    key = tile * KEYS + tl.arange(0, KEYS)
    there = key < keys
    d = tl.arange(0, DEPTH)
    deep = d[None, :] < D
    at = (start_k + key).to(tl.int64)
    keyed = tl.load(k + (at * k_key + g * k_head)[:, None] + d[None, :], mask=there[:, None] & deep, other=0.0)
    valued = tl.load(v + (at * v_key + g * v_head)[:, None] + d[None, :], mask=there[:, None] & deep, other=0.0)
    total_k = tl.zeros([KEYS, DEPTH], tl.float32)
    total_v = tl.zeros([KEYS, DEPTH], tl.float32)
    for h in range(GROUP):
        head = g * GROUP + h
        for first in range(tile * KEYS // ROWS * ROWS, keys, ROWS):
            position = first + tl.arange(0, ROWS)
            token = position - (keys - tokens)
            inside = (token >= 0) & (token < tokens)
            row = (start_q + token).to(tl.int64)
            here = inside[:, None] & deep
            query = tl.load(q + (row * q_token + head * q_head)[:, None] + d[None, :], mask=here, other=0.0)
            given = tl.load(do + (row * do_token + head * do_head)[:, None] + d[None, :], mask=here, other=0.0)
            norm = tl.load(lse + row * heads + head, mask=inside, other=0.0)
            mean = tl.load(delta + row * heads + head, mask=inside, other=0.0)
            visible = (key[None, :] <= position[:, None]) & inside[:, None]
            p = _probabilities(query, tl.trans(keyed), norm, visible, scale)
            ds = tl.where(visible, p * (tl.dot(given, tl.trans(valued)) - mean[:, None]), 0.0)
            total_k = tl.dot(tl.trans(ds.to(tl.bfloat16)), query, total_k)
            total_v = tl.dot(tl.trans(p.to(tl.bfloat16)), given, total_v)
    to = ((start_k + key).to(tl.int64) * groups + g)[:, None] * D + d[None, :]
    tl.store(dk + to, (total_k * scale).to(dk.dtype.element_ty), mask=there[:, None] & deep)
    tl.store(dv + to, total_v.to(dv.dtype.element_ty), mask=there[:, None] & deep)


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``tio::attention_backward``."""
    do, q, k, v, o = (dense_last(tensor) for tensor in (do, q, k, v, o))
    lse, cu_q, cu_k = lse.contiguous(), *(starts.contiguous().to(q.device, non_blocking=True) for starts in (cu_q, cu_k))
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
    (tokens, heads, size), (keys, groups, _) = q.shape, k.shape
    delta, sequences, group = lse.new_empty(lse.shape), cu_q.shape[0] - 1, heads // groups
    depth = triton.next_power_of_2(size)
    sizes = {"D": size, "DEPTH": depth, "GROUP": group, "SEQUENCES": triton.next_power_of_2(max(sequences, 1)), "ROWS": ROWS, "KEYS": KEYS}
    strides = [n for tensor in (do, q, k, v) for n in tensor.stride()[:2]]
    if tokens and sequences:
        grid = (triton.cdiv(tokens * group, ROWS) + sequences, groups)
        outer = (*strides, o.stride(0), o.stride(1), sequences, heads)
        _dq[grid](do, q, k, v, o, lse, delta, dq, cu_q, cu_k, scale, *outer, **sizes, LEVELS=depth.bit_length() - 1, **OPTIONS)
    if keys and sequences:
        grid = (triton.cdiv(keys, KEYS) + sequences, groups)
        _dkv[grid](do, q, k, v, lse, delta, dk, dv, cu_q, cu_k, scale, *strides, sequences, heads, groups, **sizes, **OPTIONS)
    return dq, dk, dv


KERNELS = {"attention_backward": attention_backward}
