"""Attention as the kernels of an NPU order it, on the CPU: the definition of family ``npu-910b``, not the CPU family's bytes.

For one query row and head, over the keys it sees, in blocks of 512 from position 0 of the sequence:

    s   = (ascending sum of q * k over the head axis, products exact, one fp32 accumulator) * scale
    m'  = max(m, block maximum);  p = exp(s - m')
    b   = balanced tree over the block's 512 places, an absent or masked place +0
    pv  = ascending sum over the block's keys of bf16(p) * v, one fp32 accumulator
    first block: l = b, acc = pv;   others: a = exp(m - m'), l = fl(fl(l * a) + b), acc = fl(fl(acc * a) + pv)
    o   = round(acc / l)

Sources: flash-attention-npu's published kernels for the 910B give the blocks, the softmax in fp32, the rounding of p before the second product, the
rescaling and the one rounding at the end. The vendor's own attention is not published. That the cube adds its terms one after
the other, and that exp, division and the tree inside a block are as here, is assumed: ``python -m tio_megatron.ascend_selfcheck`` compares.

``n`` query rows, ``m`` keys, ``H`` query heads, ``G`` key/value heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.kernels import math as our

KV_BLOCK = FAMILIES["npu-910b"].fields["kv_block"]


@dataclass(frozen=True)
class Order:
    """The walk. The default is the family's; anything else is another order, for negative controls and for finding out what a device does.

    Args:
        block: keys of a block.
        grid: position of the first block's start.
        splits: runs of whole blocks that are walked apart and merged (what decoding kernels do to fill a chip).
        visit_masked: masked keys take part with weight 0, so that what stands there is read.
        narrow: a block's sum is over the width that the longest row of the call sees, in runs of 64, ascending.
    """

    block: int = KV_BLOCK
    grid: int = 0
    splits: int = 1
    visit_masked: bool = False
    narrow: bool = False


FAMILY = Order()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = True, order: Order = FAMILY) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence; the last query row stands at the last key.

    Args:
        q: ``[n, H, D]`` bf16 or fp16.
        k, v: ``[m, G, D]``, m at least n.
        scale: of the scores.
        causal: row i sees the keys 0 .. m - n + i; else all.
        order: the walk.

    Returns:
        ``o[n, H, D]`` in the type of q, and fp32 ``[n, H]`` each: the maximum of the scaled scores and the sum of exponentials below it.
    """
    n, heads, size = q.shape
    groups = k.shape[1]
    o = torch.empty(n, heads, v.shape[-1], dtype=q.dtype)
    top, total = torch.empty(n, heads, dtype=torch.float32), torch.empty(n, heads, dtype=torch.float32)
    last = torch.arange(n) + (k.shape[0] - n) if causal else torch.full((n,), k.shape[0] - 1)
    for g in range(groups):
        mine = slice(g * heads // groups, (g + 1) * heads // groups)
        acc, top[:, mine], total[:, mine] = _walk(q[:, mine], k[:, g], v[:, g], last, scale, order)
        o[:, mine] = (acc / total[:, mine].unsqueeze(-1)).to(q.dtype)
    return o, top, total


def _walk(q: Tensor, k: Tensor, v: Tensor, last: Tensor, scale: float, order: Order) -> tuple[Tensor, Tensor, Tensor]:
    """One group of heads: numerator, maximum and sum."""
    blocks = list(_blocks(k.shape[0], order))
    runs = [blocks[i * len(blocks) // order.splits : (i + 1) * len(blocks) // order.splits] for i in range(order.splits)]
    done = [_run(q, k, v, last, scale, order, run) for run in runs if run]
    acc, top, total = done[0]
    for acc2, top2, total2 in done[1:]:
        new = torch.maximum(top, top2)
        a, b = our.exp(top - new), our.exp(top2 - new)
        acc, total, top = acc * a.unsqueeze(-1) + acc2 * b.unsqueeze(-1), total * a + total2 * b, new
    return acc, top, total


def _blocks(keys: int, order: Order) -> Iterator[tuple[int, int]]:
    start = 0
    while start < keys:
        stop = start + order.block - (start - order.grid) % order.block
        yield start, min(stop, keys)
        start = stop


def _run(q: Tensor, k: Tensor, v: Tensor, last: Tensor, scale: float, order: Order, blocks: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    n, heads, _ = q.shape
    acc = torch.zeros(n, heads, v.shape[-1], dtype=torch.float32)
    top = torch.full((n, heads), float("-inf"), dtype=torch.float32)
    total = torch.zeros(n, heads, dtype=torch.float32)
    for start, stop in blocks:
        live = slice(int((last < start).sum()), n)  # rows stand in the order of their positions: those before the block see none of it
        if live.start == n:
            continue
        seen = (last[live, None] >= torch.arange(start, stop)).unsqueeze(1)
        s = dot(q[live].float().unsqueeze(2), k[start:stop].float()) * scale
        s = torch.where(seen, s, float("-inf"))
        new = torch.maximum(top[live], s.amax(-1))
        p = our.exp((s - new.unsqueeze(-1)).contiguous())
        a = our.exp(top[live] - new)
        pv = _product(p.to(v.dtype).float(), v[start:stop].float(), seen, order)
        width = stop - start
        b = _narrow_sum(p) if order.narrow and width < order.block else tree(p, order.block)
        first = top[live] == float("-inf")
        total[live] = torch.where(first, b, total[live] * a + b)
        acc[live] = torch.where(first.unsqueeze(-1), pv, acc[live] * a.unsqueeze(-1) + pv)
        top[live] = new
    return acc, top, total


def _product(p: Tensor, v: Tensor, seen: Tensor, order: Order) -> Tensor:
    """``p[n, h, w]`` times ``v[w, D]``, keys ascending; a key that is not seen is not read."""
    out = torch.zeros(*p.shape[:2], v.shape[-1], dtype=torch.float32)
    everywhere = seen.squeeze(1).all(0)
    for j in range(p.shape[-1]):
        after = out + p[:, :, j, None] * v[j]
        out = after if order.visit_masked or everywhere[j] else torch.where(seen[:, :, j, None], after, out)
    return out


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last axis, ascending, one fp32 accumulator. Products of two 16-bit numbers are exact in fp32."""
    total = a[..., 0] * b[..., 0]
    for i in range(1, a.shape[-1]):
        total = total + a[..., i] * b[..., i]
    return total


def tree(p: Tensor, places: int) -> Tensor:
    """The balanced tree over ``places`` places of the last axis; those that are not there are +0."""
    p = torch.nn.functional.pad(p, (0, places - p.shape[-1]))
    while p.shape[-1] > 1:
        p = p[..., 0::2] + p[..., 1::2]
    return p[..., 0]


def _narrow_sum(p: Tensor) -> Tensor:
    total = tree(p[..., :64], 64)
    for i in range(64, p.shape[-1], 64):
        total = total + tree(p[..., i : i + 64], 64)
    return total


def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of one causal sequence, in float64 and rounded once: the vendor's order is not published, so only the values are meant."""
    n, heads, _ = q.shape
    groups = k.shape[1]
    qd, kd, vd, dod = (t.double() for t in (q, k, v, do))
    kh, vh = (t.repeat_interleave(heads // groups, 1) for t in (kd, vd))
    s = torch.einsum("nhd,mhd->hnm", qd, kh) * scale
    seen = (torch.arange(n) + (k.shape[0] - n))[:, None] >= torch.arange(k.shape[0])
    p = torch.where(seen, torch.exp(s - top.double().t().unsqueeze(-1)) / total.double().t().unsqueeze(-1), 0.0)
    dp = torch.einsum("nhd,mhd->hnm", dod, vh)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("hnm,mhd->nhd", ds, kh)
    dk = torch.einsum("hnm,nhd->mhd", ds, qd).unflatten(1, (groups, -1)).sum(2)
    dv = torch.einsum("hnm,nhd->mhd", p, dod).unflatten(1, (groups, -1)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
