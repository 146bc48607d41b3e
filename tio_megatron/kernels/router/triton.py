"""Routing in Triton: the bytes of ``reference.py``. A program has some tokens; the sum of exponentials is chains of 8 experts, then the tree.

The choices are found one after the other, the largest first and among equals the lowest id; what is then divided is added by ascending id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract.families import FAMILIES
from tio_megatron.kernels import triton_family
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.operands import require
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

CHAIN = FAMILIES["triton-sm90"].fields["router_chain"]
MOST_EXPERTS = 1024


@triton.jit
def _softmax(logits, row, tokens, experts, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, EXPERTS: tl.constexpr):
    """The probabilities ``[ROWS, EXPERTS]``, 0 past the experts; the maximum ``[ROWS]`` and the sum of exponentials ``[ROWS]``."""
    e = tl.arange(0, EXPERTS)
    here = (row[:, None] < tokens) & (e[None, :] < experts)
    value = tl.load(logits + row[:, None].to(tl.int64) * experts + e[None, :], mask=here, other=float("-inf"))
    top = tl.max(tl.where(value == value, value, float("-inf")), 1)
    chain = tl.arange(0, CHAINS)
    total = tl.zeros([ROWS, CHAINS], tl.float32)
    for j in range(CHAIN):
        column = chain * CHAIN + j
        inside = (row[:, None] < tokens) & (column[None, :] < experts)
        term = m.exp(tl.load(logits + row[:, None].to(tl.int64) * experts + column[None, :], mask=inside, other=0.0) - top[:, None])
        total = tl.where(column[None, :] < experts, total + term, total)
    total = tl.where(chain[None, :] * CHAIN < experts, total, m.absent())
    total = m.tree_last(total, ROWS, CHAINS, LEVELS)
    p = tl.where(e[None, :] < experts, tl.div_rn(m.exp(value - top[:, None]), total[:, None]), 0.0)
    return p, top, total


@triton.jit
def _scores(logits, p, tokens, experts, CHAIN: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, LEVELS: tl.constexpr, EXPERTS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value, _, _ = _softmax(logits, row, tokens, experts, CHAIN, ROWS, CHAINS, LEVELS, EXPERTS)
    e = tl.arange(0, EXPERTS)
    tl.store(p + row[:, None].to(tl.int64) * experts + e[None, :], value, mask=(row[:, None] < tokens) & (e[None, :] < experts))


@triton.jit
def _route(
    logits,
    ids,
    probs,
    tokens,
    experts,
    top_k,
    NORMALISE: tl.constexpr,
    CHAIN: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINS: tl.constexpr,
    LEVELS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p, _, _ = _softmax(logits, row, tokens, experts, CHAIN, ROWS, CHAINS, LEVELS, EXPERTS)
    e = tl.arange(0, EXPERTS)[None, :]
    key = tl.where(e < experts, tl.where(p == p, p, 0.0), -1.0)
    for _ in range(top_k):
        largest = tl.max(key, 1)
        first = tl.min(tl.where(key == largest[:, None], e, EXPERTS), 1)
        key = tl.where(e == first[:, None], -2.0, key)  # below what is past the experts: taken
    left = key == -2.0
    total = tl.zeros([ROWS], tl.float32)
    if NORMALISE:
        rest = left
        for _ in range(top_k):
            first = tl.min(tl.where(rest, e, EXPERTS), 1)
            total = total + tl.sum(tl.where(e == first[:, None], p, 0.0), 1)
            rest = rest & (e != first[:, None])
    for j in range(top_k):
        first = tl.min(tl.where(left, e, EXPERTS), 1)
        chosen = tl.sum(tl.where(e == first[:, None], p, 0.0), 1)
        if NORMALISE:
            chosen = tl.div_rn(chosen, total)
        at = row.to(tl.int64) * top_k + j
        tl.store(ids + at, first.to(tl.int64), mask=row < tokens)
        tl.store(probs + at, chosen, mask=row < tokens)
        left = left & (e != first[:, None])


@triton.jit
def _route_backward(
    dprobs,
    logits,
    ids,
    dlogits,
    tokens,
    experts,
    top_k,
    NORMALISE: tl.constexpr,
    CHAIN: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINS: tl.constexpr,
    LEVELS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    p, top, sum = _softmax(logits, row, tokens, experts, CHAIN, ROWS, CHAINS, LEVELS, EXPERTS)
    e = tl.arange(0, EXPERTS)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    if NORMALISE:
        for j in range(top_k):
            chosen = tl.load(ids + row.to(tl.int64) * top_k + j, mask=inside, other=0)
            value = tl.load(logits + row.to(tl.int64) * experts + chosen, mask=inside, other=0.0)
            total = total + tl.div_rn(m.exp(value - top), sum)
    mean = tl.zeros([ROWS], tl.float32)
    for j in range(top_k):
        chosen = tl.load(ids + row.to(tl.int64) * top_k + j, mask=inside, other=0)
        value = tl.load(logits + row.to(tl.int64) * experts + chosen, mask=inside, other=0.0)
        q = tl.div_rn(m.exp(value - top), sum)
        if NORMALISE:
            q = tl.div_rn(q, total)
        mean = mean + tl.load(dprobs + row.to(tl.int64) * top_k + j, mask=inside, other=0.0) * q
    given = tl.zeros([ROWS, EXPERTS], tl.float32)
    out = given
    for j in range(top_k):
        chosen = tl.load(ids + row.to(tl.int64) * top_k + j, mask=inside, other=0)[:, None] == e
        d = tl.load(dprobs + row.to(tl.int64) * top_k + j, mask=inside, other=0.0)[:, None]
        if NORMALISE:
            out = tl.where(chosen, tl.div_rn(p, total[:, None]) * (d - mean[:, None]), out)
        else:
            given = tl.where(chosen, d, given)
    if not NORMALISE:
        out = p * (given - mean[:, None])
    tl.store(dlogits + row[:, None].to(tl.int64) * experts + e, out, mask=inside[:, None] & (e < experts))


@triton.jit
def _balance_backward(
    logits,
    weights,
    samples,
    dlogits,
    tokens,
    experts,
    CHAIN: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINS: tl.constexpr,
    LEVELS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tokens
    p, top, sum = _softmax(logits, row, tokens, experts, CHAIN, ROWS, CHAINS, LEVELS, EXPERTS)
    sample = tl.load(samples + row, mask=inside, other=-1)
    counts = sample >= 0
    chain = tl.arange(0, CHAINS)
    total = tl.zeros([ROWS, CHAINS], tl.float32)
    for j in range(CHAIN):
        column = (chain * CHAIN + j)[None, :]
        here = counts[:, None] & (column < experts)
        q = tl.div_rn(m.exp(tl.load(logits + row[:, None].to(tl.int64) * experts + column, mask=here, other=0.0) - top[:, None]), sum[:, None])
        total = tl.where(column < experts, total + tl.load(weights + sample[:, None] * experts + column, mask=here, other=0.0) * q, total)
    mean = m.tree_last(tl.where(chain[None, :] * CHAIN < experts, total, m.absent()), ROWS, CHAINS, LEVELS)
    e = tl.arange(0, EXPERTS)[None, :]
    here = counts[:, None] & (e < experts)
    value = p * (tl.load(weights + sample[:, None] * experts + e, mask=here, other=0.0) - mean[:, None])
    tl.store(dlogits + row[:, None].to(tl.int64) * experts + e, tl.where(counts[:, None], value, 0.0), mask=inside[:, None] & (e < experts))


def _sizes(what: str, logits: Tensor) -> dict[str, int]:
    experts = logits.shape[1]
    require(experts <= MOST_EXPERTS, what, f"{experts} experts; this kernel family routes over at most {MOST_EXPERTS}")
    width = triton.next_power_of_2(max(experts, CHAIN))
    chains = width // CHAIN
    return {
        "CHAIN": CHAIN,
        "ROWS": max(1, min(16, (512 if triton_family.small(logits.device.type) else 1024) // width)),
        "CHAINS": chains,
        "LEVELS": chains.bit_length() - 1,
        "EXPERTS": width,
    }


def scores(logits: Tensor) -> Tensor:
    """``tio::router_scores``."""
    logits = logits.contiguous()
    p, sizes = torch.empty_like(logits), _sizes("router_scores", logits)
    if len(logits):
        _scores[(triton.cdiv(len(logits), sizes["ROWS"]),)](logits, p, *logits.shape, **sizes, **TWO_ROUNDINGS)
    return p


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """``tio::route``."""
    logits = logits.contiguous()
    sizes = _sizes("route", logits)
    ids, probs = logits.new_empty(len(logits), top_k, dtype=torch.int64), logits.new_empty(len(logits), top_k)
    if len(logits):
        _route[(triton.cdiv(len(logits), sizes["ROWS"]),)](logits, ids, probs, *logits.shape, top_k, NORMALISE=normalise, **sizes, **TWO_ROUNDINGS)
    return ids, probs


def route_backward(dprobs: Tensor, logits: Tensor, ids: Tensor, normalise: bool) -> Tensor:
    """``tio::route_backward``; the ids are trusted (looking at them would wait for the device)."""
    dprobs, logits, ids = dprobs.contiguous(), logits.contiguous(), ids.contiguous()
    dlogits, sizes = torch.empty_like(logits), _sizes("route_backward", logits)
    grid = (triton.cdiv(len(logits), sizes["ROWS"]),)
    if len(logits):
        _route_backward[grid](dprobs, logits, ids, dlogits, *logits.shape, ids.shape[1], NORMALISE=normalise, **sizes, **TWO_ROUNDINGS)
    return dlogits


def balance_sums(logits: Tensor, ids: Tensor, samples: Tensor, count: int) -> Tensor:
    """``tio::balance_sums``: whole numbers, so torch's own sums will do; ids and samples are trusted."""
    experts, p = logits.shape[1], scores(logits)
    undefined = p.isnan().any(1)
    chosen = torch.zeros(len(logits), experts, dtype=torch.int64, device=logits.device)
    counted = samples >= 0
    chosen.scatter_add_(1, torch.where(counted[:, None], ids, 0), counted[:, None].long().expand_as(ids))
    # Exact in fp32, since a power of two moves the exponent alone and p is at most 1; torch rounds half to even.
    units = torch.where(undefined[:, None], 0.0, p * 2.0**40).round().long()
    rows = torch.cat([chosen, units, undefined[:, None].long()], 1) * counted[:, None]
    return ids.new_zeros(count, 2 * experts + 1).index_add_(0, samples.clamp(min=0), rows) if count else ids.new_zeros(count, 2 * experts + 1)


def balance_backward(logits: Tensor, weights: Tensor, samples: Tensor) -> Tensor:
    """``tio::balance_backward``; samples are trusted."""
    logits, weights, samples = logits.contiguous(), weights.contiguous(), samples.contiguous()
    dlogits, sizes = torch.empty_like(logits), _sizes("balance_backward", logits)
    if len(logits):
        _balance_backward[(triton.cdiv(len(logits), sizes["ROWS"]),)](logits, weights, samples, dlogits, *logits.shape, **sizes, **TWO_ROUNDINGS)
    return dlogits


KERNELS = {
    "router_scores": scores,
    "route": route,
    "route_backward": route_backward,
    "balance_sums": balance_sums,
    "balance_backward": balance_backward,
}
