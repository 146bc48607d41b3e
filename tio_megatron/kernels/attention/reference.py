"""Causal attention, defined per query row and head.

``T`` query tokens, ``S`` keys, ``H`` query heads, ``G`` key/value heads (H a multiple of G), ``D`` head size, ``B`` sequences.

A row at position p of its sequence sees keys 0 .. p, in blocks of 64 counted from position 0 of the sequence. For each block:

    s    = (fma chain over D of q * k) * scale          one rounding for the product
    m'   = the larger of m and the block's scores       NaN not counted (it reaches the row through p)
    p    = exp(s - m')                                  fp32
    sum  = the block's p, added ascending from +0
    a    = exp(m - m');  l = l * a + sum                two roundings; in the first block l = sum
    acc  = acc * a, then fma(p, v, acc) for each key    in the first block acc starts at +0

    o    = round(acc / l),  lse = m + log(l)

Keys behind the mask are not part of it at all: a NaN there stays there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.kernels.exact import chain_dot, fma
from tio_megatron.kernels.math import reference as m

KV_BLOCK = FAMILIES["cpu"].fields["kv_block"]


def _sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``q[n, h, D]`` against ``k[c, D]`` -> ``[n, h, c]``."""
    return chain_dot(q.unsqueeze(2), k) * torch.tensor(scale, dtype=torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor, *, cu_q: Tensor, cu_k: Tensor, scale: float, kv_block: int = KV_BLOCK) -> tuple[Tensor, Tensor]:
    """``q[T, H, D]``, ``k, v[S, G, D]`` -> ``o[T, H, D]`` in the type of q, ``lse[T, H]`` fp32."""
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    group = q.shape[1] // k.shape[1]
    for rows, keys in _sequences(cu_q, cu_k):
        for g in range(k.shape[1]):
            heads = slice(g * group, (g + 1) * group)
            o[rows, heads], lse[rows, heads] = _one_group(q[rows, heads].float(), k[keys, g].float(), v[keys, g].float(), scale, kv_block, q.dtype)
    return o, lse


def _one_group(q: Tensor, k: Tensor, v: Tensor, scale: float, kv_block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    n, h, d = q.shape
    position = torch.arange(n) + (k.shape[0] - n)
    top, total, acc = torch.full((n, h), float("-inf"), dtype=torch.float32), torch.zeros(n, h, dtype=torch.float32), torch.zeros(n, h, d, dtype=torch.float32)
    for start in range(0, k.shape[0], kv_block):
        live = (position >= start).nonzero().squeeze(1)
        stop = min(start + kv_block, k.shape[0])
        s = _scores(q[live], k[start:stop], scale)
        visible = (position[live, None] >= torch.arange(start, stop)).unsqueeze(1)
        new = torch.maximum(top[live], torch.where(visible & ~s.isnan(), s, float("-inf")).amax(-1))
        p = m.exp(s - new.unsqueeze(-1))
        block = torch.zeros(live.numel(), h, dtype=torch.float32)
        a = m.exp(top[live] - new)
        rows = acc[live] * a.unsqueeze(-1) if start else torch.zeros(live.numel(), h, d, dtype=torch.float32)
        for j in range(stop - start):
            block = torch.where(visible[:, :, j], block + p[:, :, j], block)
            rows = torch.where(visible[:, :, j, None], fma(p[:, :, j, None], v[start + j], rows), rows)
        total[live] = total[live] * a + block if start else block
        top[live], acc[live] = new, rows
    return (acc / total.unsqueeze(-1)).to(dtype), top + m.log(total)


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` in the types of q, k, v.

    Per row and head: delta = fma chain over D of do * o. Per key: p = exp(s - lse), ds = p * (fma chain of do * v - delta).
    dq: each key block's fma chain of ds * k from +0, added over key blocks ascending, then times scale. dk (ds * q, then times
    scale) and dv (p * do): for one head, each query block's fma chain from +0, added over query blocks ascending; then heads of the
    group ascending. Query blocks are 64 positions of the sequence, as key blocks are.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    factor = torch.tensor(scale, dtype=torch.float32)
    for rows, keys in _sequences(cu_q, cu_k):
        for g in range(k.shape[1]):
            kf, vf = k[keys, g].float(), v[keys, g].float()
            total_k, total_v = torch.zeros_like(kf), torch.zeros_like(vf)
            for head in range(g * group, (g + 1) * group):
                one = _one_head_backward(do[rows, head].float(), q[rows, head].float(), kf, vf, o[rows, head].float(), lse[rows, head], scale)
                dq[rows, head] = (one[0] * factor).to(q.dtype)
                total_k, total_v = total_k + one[1], total_v + one[2]
            dk[keys, g], dv[keys, g] = (total_k * factor).to(k.dtype), total_v.to(v.dtype)
    return dq, dk, dv


def _one_head_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    n, d = q.shape
    offset = k.shape[0] - n
    delta = chain_dot(do, o)
    dq, dk, dv = torch.zeros(n, d, dtype=torch.float32), torch.zeros_like(k), torch.zeros_like(v)
    for k0 in range(0, k.shape[0], KV_BLOCK):
        k1 = min(k0 + KV_BLOCK, k.shape[0])
        for p0 in range(k0, k.shape[0], KV_BLOCK):
            rows = slice(max(p0 - offset, 0), max(min(p0 + KV_BLOCK, k.shape[0]) - offset, 0))
            if rows.start == rows.stop:
                continue
            visible = (torch.arange(rows.start, rows.stop)[:, None] + offset) >= torch.arange(k0, k1)
            p = m.exp(_scores(q[rows].unsqueeze(1), k[k0:k1], scale).squeeze(1) - lse[rows].unsqueeze(-1))
            ds = p * (chain_dot(do[rows].unsqueeze(1), v[k0:k1]) - delta[rows].unsqueeze(-1))
            block = torch.zeros(rows.stop - rows.start, d, dtype=torch.float32)
            for j in range(k1 - k0):
                block = torch.where(visible[:, j, None], fma(ds[:, j, None], k[k0 + j], block), block)
            dq[rows] = dq[rows] + block
            block_k, block_v = torch.zeros(k1 - k0, d, dtype=torch.float32), torch.zeros(k1 - k0, d, dtype=torch.float32)
            for i in range(rows.stop - rows.start):
                see = visible[i, :, None]
                block_k = torch.where(see, fma(ds[i, :, None], q[rows.start + i], block_k), block_k)
                block_v = torch.where(see, fma(p[i, :, None], do[rows.start + i], block_v), block_v)
            dk[k0:k1], dv[k0:k1] = dk[k0:k1] + block_k, dv[k0:k1] + block_v
    return dq, dk, dv


def write_pages(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """``k, v[T, G, D]`` into ``cache[pages, G, page, 2 * D]`` at ``slot_mapping[T]`` (page number * page + place); negative: skipped.

    The interior of one page and head is, for each 64 keys, ``[D][64]`` keys and then ``[64][D]`` values.
    """
    pages, heads, page, width = cache.shape
    d = width // 2
    inside = cache.view(pages, heads, page // KV_BLOCK, 2, KV_BLOCK * d)
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            n, place = divmod(slot, page)
            block, j = divmod(place, KV_BLOCK)
            inside[n, :, block, 0].view(heads, d, KV_BLOCK)[:, :, j] = k[t]
            inside[n, :, block, 1].view(heads, KV_BLOCK, d)[:, j] = v[t]


def read_pages(cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys and values ``[length, G, D]`` of the sequence whose pages are listed."""
    _, heads, page, width = cache.shape
    d = width // 2
    taken = cache[pages[: -(-length // page)].long()].view(-1, heads, page // KV_BLOCK, 2, KV_BLOCK * d)
    k = taken[:, :, :, 0].reshape(-1, heads, page // KV_BLOCK, d, KV_BLOCK).permute(0, 2, 4, 1, 3)
    v = taken[:, :, :, 1].reshape(-1, heads, page // KV_BLOCK, KV_BLOCK, d).permute(0, 2, 3, 1, 4)
    return k.reshape(-1, heads, d)[:length], v.reshape(-1, heads, d)[:length]


def attention_paged(q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, *, scale: float) -> Tensor:
    """``q[T, H, D]`` over the pages of each sequence: the same rows as :func:`attention` gives."""
    o = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        k, v = read_pages(cache, block_table[i], length)
        cu_q, cu_k = torch.tensor([0, rows.stop - rows.start]), torch.tensor([0, length])
        o[rows] = attention(q[rows], k, v, cu_q=cu_q, cu_k=cu_k, scale=scale)[0]
    return o
