"""One block of a mixture of experts and a head, small, as trainer and as rollout, in the contract's order and in the stock packages' way.

``T`` tokens, ``H`` hidden, ``E`` experts, ``V`` vocabulary. A layout is the number of ranks that cut the heads, and whether they cut the experts too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tio_megatron.collectives import all_reduce_nodes
from tio_megatron.contract import FAMILIES, ReductionTree, VocabOrder
from tio_megatron.kernels.attention import npu as attention
from tio_megatron.kernels.combine import combine
from tio_megatron.kernels.grouped import npu as grouped
from tio_megatron.kernels.linear import linear
from tio_megatron.kernels.logprob import log_softmax
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.router import route
from tio_megatron.kernels.swiglu import swiglu
from tio_megatron.layers.permute import plan_rows
from tio_megatron.verify.ascend.facts import cumulative
from tio_megatron.verify.ascend.place import Place

HEADS, GROUPS, SIZE = 8, 4, 128
HIDDEN, EXPERTS, TOP_K, FFN, VOCAB = 256, 8, 2, 128, 512
LEAVES = FAMILIES["npu-910b"].cuts["attn_row"]
EPS, SCALE, PAGE = 1e-6, SIZE**-0.5, 128
LENGTHS = (5, 40, 19)
"""Sequences of the question; the rollout reads each as a prefill of all but three tokens, a chunk of two, and one decoded token."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """``tp`` ranks cut the heads; with ``ep`` the same ranks cut the experts, which are whole."""

    tp: int
    ep: bool

    def __str__(self) -> str:
        return f"TP {self.tp}" + (f" EP {self.tp}" if self.ep else "")


def layouts(devices: int) -> list[Layout]:
    """Those that fit, at most as many ranks as there are key/value heads."""
    sizes = [n for n in (1, 2, 4) if n <= min(devices, GROUPS)]
    return [Layout(n, ep) for n in sizes for ep in (False, True) if n > 1 or not ep]


class Block:
    """The weights, the same everywhere, and one rank's part of the work."""

    def __init__(self, place: Place) -> None:
        self.place = place
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": ((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
            "o": (HIDDEN, HEADS * SIZE),
            "router": (EXPERTS, HIDDEN),
            "head": (VOCAB, HIDDEN),
        }
        shapes |= {"gate_up": (EXPERTS, 2 * FFN, HIDDEN), "down": (EXPERTS, HIDDEN, FFN)}
        self.w = {name: place.random(*shape, seed=40 + i, scale=shape[-1] ** -0.5) for i, (name, shape) in enumerate(shapes.items())}
        self.gamma = {
            name: place.random(width, seed=60 + i)
            for i, (name, width) in enumerate((("in", HIDDEN), ("post", HIDDEN), ("out", HIDDEN), ("q", SIZE), ("k", SIZE)))
        }
        self.x = place.random(sum(LENGTHS), HIDDEN, seed=80)
        self.target = torch.randint(0, VOCAB, (sum(LENGTHS), 1), generator=torch.Generator().manual_seed(81)).to(place.device)

    def heads(self, rank: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """This rank's rows of the fused product and columns of the output product."""
        q, k, v = self.w["qkv"].split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE])
        mine = torch.cat([t.chunk(layout.tp)[rank] for t in (q, k, v)])
        return mine, self.w["o"].chunk(layout.tp, 1)[rank]

    def split(self, fused: Tensor, layout: Layout, normalise: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [HEADS * SIZE // layout.tp, GROUPS * SIZE // layout.tp, GROUPS * SIZE // layout.tp]
        q, k, v = (t.unflatten(1, (-1, SIZE)).contiguous() for t in fused.split(sizes, 1))
        return normalise(q, self.gamma["q"]), normalise(k, self.gamma["k"]), v


def ours(block: Block, layout: Layout, rank: int, group: dist.ProcessGroup | None, attend: Attend) -> Tensor:
    """Log-probabilities of the targets, ``[T]`` fp32, by the contract."""

    def normalise(x: Tensor, gamma: Tensor) -> Tensor:
        return norm.rms_norm(x, gamma, EPS)

    w_in, w_out = block.heads(rank, layout)
    h = normalise(block.x, block.gamma["in"])
    q, k, v = block.split(linear(h, w_in, leaves=1), layout, normalise)
    tree = ReductionTree(LEAVES)
    spans = [tree.frontier(r * LEAVES // layout.tp, (r + 1) * LEAVES // layout.tp) for r in range(layout.tp)]
    part = linear(attend(q, k, v).flatten(1), w_out, leaves=LEAVES // layout.tp, out_dtype=torch.float32)
    x = block.x + all_reduce_nodes(part[None], spans, tree, group, out_dtype=torch.bfloat16)

    h = normalise(x, block.gamma["post"])
    ids, probs = _ids_and_probs(linear(h, block.w["router"], leaves=1, out_dtype=torch.float32))
    parts = layout.tp if layout.ep else 1
    mine = rank if layout.ep else 0
    lo, hi = mine * EXPERTS // parts, (mine + 1) * EXPERTS // parts
    plan = plan_rows(ids, lo, hi)
    up = grouped.grouped(h[plan.token], list(block.w["gate_up"][lo:hi]), plan.offsets, 1, False, torch.bfloat16)
    rows = grouped.grouped(swiglu(up), list(block.w["down"][lo:hi]), plan.offsets, 1, False, torch.bfloat16)
    experts = ReductionTree(EXPERTS)
    nodes = [experts.frontier(r * EXPERTS // parts, (r + 1) * EXPERTS // parts) for r in range(parts)]
    sums = combine(rows, plan.index, ids, probs, experts=EXPERTS, nodes=nodes[mine])
    x = x + all_reduce_nodes(sums, nodes, experts, group if layout.ep else None, out_dtype=torch.bfloat16)

    logits = linear(normalise(x, block.gamma["out"]), block.w["head"], leaves=1, out_dtype=torch.float32)
    return log_softmax(logits, VocabOrder(VOCAB, 1, 128)).gather(1, block.target).squeeze(1)


def _ids_and_probs(logits: Tensor) -> tuple[Tensor, Tensor]:
    first, second = route(logits, TOP_K)
    ids, probs = (first, second) if first.dtype == torch.int64 else (second, first)
    order = ids.argsort(1)
    return ids.gather(1, order), probs.gather(1, order)


def stock(block: Block, layout: Layout, rank: int, group: dist.ProcessGroup | None, attend: Attend) -> Tensor:
    """The same block as engines compute it: library products in bf16, sums between ranks by the vendor, experts added one after the other."""

    def normalise(x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gamma, EPS)

    def total(x: Tensor) -> Tensor:
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    w_in, w_out = block.heads(rank, layout)
    q, k, v = block.split(F.linear(normalise(block.x, block.gamma["in"]), w_in), layout, normalise)
    x = block.x + total(F.linear(attend(q, k, v).flatten(1), w_out))
    h = normalise(x, block.gamma["post"])
    probs, ids = F.linear(h, block.w["router"]).float().softmax(1).topk(TOP_K)
    probs = (probs / probs.sum(1, keepdim=True)).bfloat16()
    parts, mine = (layout.tp, rank) if layout.ep else (1, 0)
    y = torch.zeros_like(x)
    for e in range(mine * EXPERTS // parts, (mine + 1) * EXPERTS // parts):
        token, choice = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(h[token], block.w["gate_up"][e]).chunk(2, 1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, block.w["down"][e]) * probs[token, choice, None])
    x = x + (total(y) if layout.ep else y)
    logits = F.linear(normalise(x, block.gamma["out"]), block.w["head"]).float()
    return logits.log_softmax(1).gather(1, block.target).squeeze(1)


def train(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a trainer has it: a pack of whole sequences."""
    starts = cumulative(list(LENGTHS))
    return attention.attention(q, k, v, starts, starts, SCALE)[0]


def roll(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a rollout has it: pages, and every sequence in three steps, prefill, a chunk, and one token."""
    pages = [-(-n // PAGE) for n in LENGTHS]
    cache = torch.full((sum(pages), k.shape[1], PAGE, 2 * SIZE), float("nan"), dtype=q.dtype, device=q.device)
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    starts, out = cumulative(list(LENGTHS)).tolist(), torch.empty_like(q)
    for i, count in enumerate(pages):
        table[i, :count] = sum(pages[:i]) + torch.arange(count)
    for step in range(3):
        cuts = [(0, n - 3, n - 1, n)[step : step + 2] for n in LENGTHS]
        rows = torch.cat([starts[i] + torch.arange(a, b) for i, (a, b) in enumerate(cuts)])
        slots = torch.cat([table[i, torch.arange(a, b) // PAGE].long() * PAGE + torch.arange(a, b) % PAGE for i, (a, b) in enumerate(cuts)])
        rows = rows.to(q.device)
        attention.write_pages(k[rows], v[rows], cache, slots.to(q.device))
        part = torch.empty_like(q[rows])
        seen = torch.tensor([b for _, b in cuts], dtype=torch.int32)
        attention.attention_paged(q[rows], cache, table.to(q.device), seen, cumulative([b - a for a, b in cuts]), SCALE, part)
        out[rows] = part
    return out
