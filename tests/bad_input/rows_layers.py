"""Tensors, layouts and orders that layers and collectives do not take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.bad_input.table import Row
from tio_megatron import collectives
from tio_megatron.contract import Contract, Cuts, Layout, ModelShape, ReductionTree
from tio_megatron.kernels.norm import rms_norm
from tio_megatron.layers.attention import attention
from tio_megatron.layers.linear import row_parallel
from tio_megatron.layers.router import route_tokens, router_logits
from tio_megatron.layers.vocab import at_temperature, check_tokens

LAYERS, SUMS, CONTRACT = "layers", "collectives", "layouts and contracts"
SHAPE = ModelShape(layers=2, hidden=64, heads=8, kv_heads=2, head_dim=16, vocab=700, experts=16, top_k=4, moe_ffn=32)
HALF, BF16 = torch.float16, torch.bfloat16


def now(call: Callable[[], object]) -> Callable[[Path], Callable[[], object]]:
    return lambda folder: call


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


ROWS = [
    Row(
        LAYERS,
        "a product of float16",
        "linear: dtype torch.float16 is not supported; use torch.float32 or torch.bfloat16",
        now(lambda: row_parallel(zeros(2, 8, dtype=HALF), zeros(4, 8, dtype=HALF), leaves=1)),
    ),
    Row(
        LAYERS,
        "a product whose widths differ",
        "linear: shapes (2, 8) and (4, 16) share no last axis",
        now(lambda: row_parallel(zeros(2, 8), zeros(4, 16), leaves=1)),
    ),
    Row(
        LAYERS,
        "a width that does not divide into leaves",
        "linear: 9 terms do not divide into 8 equal leaves; [1] would work",
        now(lambda: row_parallel(zeros(2, 9), zeros(4, 9), leaves=8)),
    ),
    Row(LAYERS, "a norm whose weight has another width", "rms_norm: w has shape [16]; expected [8]", now(lambda: rms_norm(zeros(2, 8), zeros(16), 1e-6))),
    Row(
        LAYERS,
        "attention with a head of 24",
        "attention: head size 24 is not supported; a multiple of 16 up to 256 is",
        now(lambda: attention(zeros(3, 1, 2, 24), zeros(3, 1, 2, 24), zeros(3, 1, 2, 24), scale=1.0)),
    ),
    Row(
        LAYERS,
        "attention whose cu_seqlens pass the end",
        "cu_seqlens ends at 9, but there are 3 tokens",
        now(lambda: attention(zeros(3, 2, 16), zeros(3, 2, 16), zeros(3, 2, 16), scale=1.0, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))),
    ),
    Row(LAYERS, "a router in another dtype than its tokens", "keep both in one dtype", now(lambda: router_logits(zeros(2, 8, dtype=BF16), zeros(4, 8)))),
    Row(
        LAYERS,
        "more experts for a token than there are",
        "route: top_k 5 of 4 experts; it must be between 1 and 4",
        now(lambda: route_tokens(zeros(2, 4), 5, normalise=True)),
    ),
    Row(
        LAYERS,
        "a token outside the vocabulary",
        "embedding: id 700 at [0] is outside the vocabulary of 700",
        now(lambda: check_tokens(torch.tensor([700]), 700, "embedding")),
    ),
    Row(LAYERS, "a temperature of 0", "temperature must be a positive finite number, got 0.0", now(lambda: at_temperature(zeros(2, 8), 0.0))),
    Row(SUMS, "a sum of bf16", "fp32 only, got torch.bfloat16", now(lambda: collectives.all_reduce(zeros(4, dtype=BF16), None))),
    Row(
        SUMS,
        "a sum rounded to whole numbers",
        "out_dtype must be float32 or a narrower",
        now(lambda: collectives.all_reduce(zeros(4), None, out_dtype=torch.int32)),
    ),
    Row(SUMS, "a result of another shape", "out must be contiguous torch.float32 of shape", now(lambda: collectives.all_reduce(zeros(4), None, out=zeros(5)))),
    Row(SUMS, "splits that do not add up", "splits must be 1 counts that sum to 4 rows", now(lambda: collectives.reduce_scatter(zeros(4), None, splits=[3]))),
    Row(SUMS, "a scalar to gather", "got a scalar", now(lambda: collectives.all_gather(zeros(1)[0], None))),
    Row(SUMS, "a tensor that wants a gradient", "not differentiable", now(lambda: collectives.all_reduce(zeros(4).requires_grad_(), None))),
    Row(
        SUMS,
        "rows that the other side does not expect",
        "keeps 4 rows by in_splits, but 3 by out_splits",
        now(lambda: collectives.all_to_all(zeros(4), [3], [4], None)),
    ),
    Row(
        SUMS,
        "a schedule that is none",
        "unknown schedule 'tree'; these work: auto, doubling, scatter, ring",
        now(lambda: collectives.explain(2, [3], schedule="tree")),
    ),
    Row(CONTRACT, "TP 3", "8 query heads do not divide by tp 3; tp in [1, 2, 4, 8] would work", now(lambda: Contract().check(Layout(tp=3), SHAPE))),
    Row(
        CONTRACT,
        "EP 5 over 16 experts",
        "16 experts do not divide by ep 5; ep in [1, 2, 4, 8, 16] would work",
        now(lambda: Contract().check(Layout(ep=5, etp=1, dp=5), SHAPE)),
    ),
    Row(CONTRACT, "TP 4 on two leaves", "cuts.attn_row = 4", now(lambda: Contract(cuts=Cuts(attn_row=2)).check(Layout(tp=4, etp=1), SHAPE))),
    Row(CONTRACT, "six leaves", "cuts.attn_row must be a power of two, got 6", now(lambda: Cuts(attn_row=6))),
    Row(CONTRACT, "a tree over no terms", "a tree needs at least one leaf, got 0", now(lambda: ReductionTree(0))),
    Row(CONTRACT, "a run outside the tree", "leaves [2, 9) are not inside a tree of 4", now(lambda: ReductionTree(4).frontier(2, 9))),
]
