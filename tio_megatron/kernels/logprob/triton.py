"""Parts of the log-softmax in Triton: the bytes of ``reference.py``. Blocks of 128 columns lie side by side in the lanes, then the vocabulary's tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tio_megatron.contract import VocabOrder
from tio_megatron.contract.tree import ABSENT
from tio_megatron.kernels import triton_math as m
from tio_megatron.kernels.math.triton import tree_add
from tio_megatron.kernels.operands import dense_last
from tio_megatron.kernels.triton_family import TWO_ROUNDINGS

BLOCK = 1024
LANES = 128
NEVER = tl.constexpr(-128.0)


@triton.jit
def _max(logits, top, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf"))
        found = m.larger(found, tl.where(value == value, value, float("-inf")))
    tl.store(top + row, tl.max(found, 0) + 0.0)


@triton.jit
def _blocks(logits, top, leaves, stride, tokens, columns, first, blocks, per_run, run_stride, CHAIN: tl.constexpr, WEIGHTED: tl.constexpr, LANES: tl.constexpr):
    """``leaves[leaf, token]``: the chain over each block of ``CHAIN`` columns; the shard begins with block ``first`` of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * LANES + tl.arange(0, LANES)
    largest = tl.load(top + row)
    total = tl.zeros([LANES], tl.float32)
    for j in range(CHAIN):
        column = block * CHAIN + j
        d = tl.load(logits + row * stride + column, mask=column < columns, other=0.0) - largest
        term = m.exp(d)
        if WEIGHTED:
            term = term * tl.where(d < NEVER, NEVER, d)
        total = tl.where(column < columns, total + term, total)
    number = first + block
    leaf = number // per_run * run_stride + number % per_run
    tl.store(leaves + leaf.to(tl.int64) * tokens + row, total, mask=block < blocks)


@triton.jit
def _rows(logits, top, sum, weighted, d, target, out, stride, width, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One row: 0 its log-probabilities, 1 the gradient of one, 2 that of the entropy; the gradients +0 from ``columns`` to ``width``."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = tl.load(top + row), tl.load(sum + row)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        low = tl.load(logits + row * stride + at, mask=at < columns, other=0.0) - largest
        if KIND == 0:
            value = low - m.log(total)
        else:
            p = tl.div_rn(m.exp(low), total)
            if KIND == 1:
                value = tl.load(d + row) * (tl.where(at == tl.load(target + row), 1.0, 0.0) - p)
            else:
                ratio = tl.div_rn(tl.load(weighted + row), total)
                value = tl.load(d + row) * (p * (ratio - tl.where(low < NEVER, NEVER, low)))
            value = tl.where(at < columns, value, 0.0)
        tl.store(out + row * width + at, value, mask=at < width)


@triton.jit
def _ends(x, top, sum, y, n, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    total = tl.load(sum + at, mask=here, other=1.0)
    value = tl.load(x + at, mask=here, other=0.0)
    if ENTROPY:
        result = m.log(total) - tl.div_rn(value, total)
    else:
        result = (value - tl.load(top + at, mask=here, other=0.0)) - m.log(total)
    tl.store(y + at, result, mask=here)


def vocab_max(logits: Tensor, true_cols: int) -> Tensor:
    """``tio::vocab_max``."""
    logits = dense_last(logits)
    top = logits.new_empty(len(logits))
    if len(logits):
        _max[(len(logits),)](logits, top, logits.stride(0), true_cols, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return top


def vocab_sumexp(logits: Tensor, top: Tensor, vocab: int, runs: int, block: int, lo: int, hi: int, weighted: bool) -> Tensor:
    """``tio::vocab_sumexp``: ``[F, T]``."""
    order = VocabOrder(vocab, runs, block)
    nodes = order.frontier(lo, hi)
    logits, top = dense_last(logits), top.contiguous()
    columns = max(0, min(hi, vocab) - lo)
    blocks = triton.cdiv(columns, block)
    leaves = logits.new_full((order.tree.leaves, len(logits)), ABSENT)
    if blocks and len(logits):
        sizes = {"CHAIN": block, "WEIGHTED": weighted, "LANES": LANES}
        shard = (columns, lo // block, blocks, order.blocks_per_run, order.stride)
        _blocks[(len(logits), triton.cdiv(blocks, LANES))](logits, top, leaves, logits.stride(0), len(logits), *shard, **sizes, **TWO_ROUNDINGS)
    if not nodes:
        return logits.new_empty(0, len(logits))
    return torch.stack([tree_add(leaves[node.start : node.stop]) for node in nodes])


def log_softmax(logits: Tensor, vocab: int, runs: int, block: int) -> Tensor:
    """``tio::log_softmax``: whole rows."""
    logits = dense_last(logits)
    top = vocab_max(logits, vocab)
    total = vocab_sumexp(logits, top, vocab, runs, block, 0, VocabOrder(vocab, runs, block).padded, False)[0]
    return _by_rows(0, logits, top, total, total, total, total, vocab, vocab)


def gather_logprob(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """``tio::gather_logprob``."""
    return _by_elements(False, x, top, total)


def entropy(total: Tensor, weighted: Tensor) -> Tensor:
    """``tio::entropy``."""
    return _by_elements(True, weighted, weighted, total)


def logprob_backward(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, target: Tensor, true_cols: int) -> Tensor:
    """``tio::logprob_backward``."""
    return _by_rows(1, dense_last(logits), top, total, total, d, target, logits.shape[1], true_cols)


def entropy_backward(d: Tensor, logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor, true_cols: int) -> Tensor:
    """``tio::entropy_backward``."""
    return _by_rows(2, dense_last(logits), top, total, weighted, d, d, logits.shape[1], true_cols)


def _by_rows(kind: int, logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor, d: Tensor, target: Tensor, width: int, columns: int) -> Tensor:
    out = logits.new_empty(len(logits), width)
    if out.numel():
        given = (tensor.contiguous() for tensor in (top, total, weighted, d, target))
        _rows[(len(logits),)](logits, *given, out, logits.stride(0), width, columns, KIND=kind, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return out


def _by_elements(is_entropy: bool, x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    x, top, total = x.contiguous(), top.contiguous(), total.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _ends[(triton.cdiv(x.numel(), BLOCK),)](x, top, total, y, x.numel(), ENTROPY=is_entropy, BLOCK=BLOCK, **TWO_ROUNDINGS)
    return y


KERNELS = {
    "vocab_max": vocab_max,
    "vocab_sumexp": vocab_sumexp,
    "log_softmax": log_softmax,
    "gather_logprob": gather_logprob,
    "logprob_backward": logprob_backward,
    "entropy": entropy,
    "entropy_backward": entropy_backward,
}
