"""A Qwen3-MoE decoder of our layers, twice: as trainer ranks (TP, EP, sequence parallel) and as rollout (TP 1, paged). For checks on one accelerator.

The engines themselves are not in it: this shows that the layers and kernels of a device give one result whichever way they are cut. Beside it, the
same decoder of plain torch, whole and token by token.

Legend: ``S`` tokens, ``H`` hidden, ``E`` experts, ``I`` width of one, ``V`` vocabulary, ``P`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tio_megatron.contract import Contract
from tio_megatron.kernels import attention as attention_kernel
from tio_megatron.kernels import rope as rope_kernel
from tio_megatron.kernels.rope import rope_table
from tio_megatron.layers import activation, attention, dispatch, experts, linear, norm, rope, router, vocab
from tio_megatron.layers.experts_replicated import experts_replicated

EPS = 1e-6
PAGE = 64
Weights = dict[str, Tensor]
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder; the defaults are Qwen3-30B-A3B's, one layer of it."""

    layers: int = 1
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head: int = 128
    experts: int = 128
    top_k: int = 8
    ffn: int = 768
    vocab: int = 151936

    def weights(self, seed: int, device: str) -> Weights:
        """Random bf16 weights, whole, the same for a seed on every rank (made on the CPU)."""
        generator = torch.Generator("cpu").manual_seed(seed)

        def make(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cpu") * shape[-1] ** -0.5).bfloat16().to(device)

        found = {"embedding": make(self.vocab, self.hidden) * 16, "head": make(self.vocab, self.hidden) * 4, "norm": torch.ones(self.hidden)}
        group = (self.heads // self.kv_heads + 2) * self.head
        for i in range(self.layers):
            # As Megatron keeps it: for each key/value head its query heads, then the key, then the value.
            found[f"{i}.qkv"] = make(self.kv_heads * group, self.hidden)
            found[f"{i}.o"] = make(self.hidden, self.heads * self.head)
            found[f"{i}.gate"] = make(self.experts, self.hidden)
            found[f"{i}.w13"] = make(self.experts, 2 * self.ffn, self.hidden)
            found[f"{i}.w2"] = make(self.experts, self.hidden, self.ffn)
            found.update({f"{i}.norm1": torch.ones(self.hidden), f"{i}.norm2": torch.ones(self.hidden)})
            found.update({f"{i}.q_norm": torch.ones(self.head), f"{i}.k_norm": torch.ones(self.head)})
        return {name: weight.bfloat16().to(device) for name, weight in found.items()}

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[S, groups * (q + 2) * D]`` -> q ``[S, heads, D]``, k and v ``[S, groups, D]``."""
        each = self.heads // self.kv_heads
        q, k, v = qkv.view(len(qkv), -1, each + 2, self.head).split([each, 1, 1], 2)
        return q.reshape(len(qkv), -1, self.head), k.squeeze(2), v.squeeze(2)


def train_scores(shape: Shape, weights: Weights, ids: Tensor, contract: Contract, group: Group = None) -> Tensor:
    """Log-probability of each next token, ``[S - 1]`` fp32, by a trainer that is TP, EP and sequence parallel over ``group``."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    order = contract.vocab_order(shape.vocab)
    shard = vocab.VocabShard(order, order.padded // size, rank, size)
    own_rows = slice(shard.first, shard.first + shard.true_rows)
    table = rope_table(len(ids), shape.head, 1e6).to(ids.device)
    leaves = contract.leaves_of("attn_row", shape.heads * shape.head, size, "attention.o")
    ways = dispatch.ExpertGroups(shape.experts, ep=group, etp=None, all=group)
    mine = slice(rank * shape.experts // size, (rank + 1) * shape.experts // size)
    parallel = {"group": group, "sequence_parallel": size > 1}
    x = vocab.vocab_embedding(ids[:, None], weights["embedding"][own_rows], shard, **parallel)
    for i in range(shape.layers):
        w = {name: weights[f"{i}.{name}"] for name in ("qkv", "o", "gate", "w13", "w2", "norm1", "norm2", "q_norm", "k_norm")}
        h = norm.rms_norm(x, w["norm1"], EPS)
        dgrad_leaves = contract.leaves_of("col_dgrad", len(w["qkv"]), size, "attention.qkv")
        qkv = linear.column_parallel(h, w["qkv"].chunk(size)[rank].contiguous(), dgrad_leaves=dgrad_leaves, **parallel)
        q, k, v = shape.heads_of(qkv[:, 0])
        q = rope.rope(norm.rms_norm(q, w["q_norm"], EPS)[:, None], table)
        k = rope.rope(norm.rms_norm(k, w["k_norm"], EPS)[:, None], table)
        o = attention.attention(q, k, v[:, None], scale=shape.head**-0.5)
        x = x + linear.row_parallel(o.flatten(2), w["o"].chunk(size, 1)[rank].contiguous(), leaves=leaves, **parallel)
        h = norm.rms_norm(x, w["norm2"], EPS)
        chosen, probs = router.route_tokens(router.router_logits(h, w["gate"]), shape.top_k, normalise=True)
        way = dispatch.AllToAll(chosen, ways)
        rows = way.dispatch(way.spread(h.flatten(0, 1)))
        leaves_of_one = (contract.cuts.expert_row, contract.cuts.expert_col_dgrad)
        rows = experts.ExpertMLP.apply(rows, way.offsets, *leaves_of_one, None, None, *w["w13"][mine].unbind(), *w["w2"][mine].unbind())
        x = x + way.combine(way.collect(rows), probs).view(x.shape)
    logits = vocab.vocab_logits(norm.rms_norm(x, weights["norm"], EPS), _padded(weights["head"], shard), shard, **parallel)
    return vocab.vocab_logprob(logits[:-1, 0], ids[1:], shard, group=group)


def rollout_scores(shape: Shape, weights: Weights, ids: Tensor, contract: Contract, prompt: int, chunk: int) -> Tensor:
    """The same by a rollout of TP 1 over pages: the prompt in chunks, then one token at a time."""
    order = contract.vocab_order(shape.vocab)
    shard = vocab.VocabShard(order, shape.vocab)
    table = rope_table(len(ids), shape.head, 1e6).to(ids.device)
    pages = -(-len(ids) // PAGE)
    empty = [torch.zeros(pages, shape.kv_heads, PAGE, 2 * shape.head, dtype=torch.bfloat16, device=ids.device) for _ in range(shape.layers)]
    # Pages in another order than the tokens.
    block_table = torch.arange(pages, dtype=torch.int32, device=ids.device).flip(0)[None]
    starts = [*range(0, prompt, chunk), *range(prompt, len(ids))]
    found = []
    for lo, hi in zip(starts, [*starts[1:], len(ids)], strict=True):
        where = torch.arange(lo, hi, device=ids.device)
        slots = block_table[0, where // PAGE].long() * PAGE + where % PAGE
        lengths = torch.tensor([0, hi - lo], dtype=torch.int32, device=ids.device)
        keys = torch.tensor([hi], dtype=torch.int32, device=ids.device)
        x = weights["embedding"][ids[lo:hi]]
        for i in range(shape.layers):
            w = {name: weights[f"{i}.{name}"] for name in ("qkv", "o", "gate", "w13", "w2", "norm1", "norm2", "q_norm", "k_norm")}
            q, k, v = shape.heads_of(linear.column_parallel(norm.rms_norm(x, w["norm1"], EPS), w["qkv"]))
            q = rope_kernel.rope(norm.rms_norm(q, w["q_norm"], EPS), where, table)
            k = rope_kernel.rope(norm.rms_norm(k, w["k_norm"], EPS), where, table)
            attention_kernel.write_pages(k, v, empty[i], slots)
            o = attention_kernel.attention_paged(q, empty[i], block_table, keys, lengths, scale=shape.head**-0.5)
            x = x + linear.row_parallel(o.flatten(1), w["o"], leaves=contract.cuts.attn_row)
            h = norm.rms_norm(x, w["norm2"], EPS)
            chosen, probs = router.route_tokens(router.router_logits(h, w["gate"]), shape.top_k, normalise=True)
            given = {"experts": shape.experts, "leaves": contract.cuts.expert_row}
            x = x + experts_replicated(h, chosen, probs, list(w["w13"].unbind()), list(w["w2"].unbind()), **given)
        logits = vocab.vocab_logits(norm.rms_norm(x, weights["norm"], EPS), weights["head"], shard)
        last = min(hi, len(ids) - 1)
        if last > lo:
            found.append(vocab.vocab_logprob(logits[: last - lo], ids[lo + 1 : last + 1], shard))
    return torch.cat(found)


def stock_scores(shape: Shape, weights: Weights, ids: Tensor, step: int) -> Tensor:
    """The same of plain torch (``F.linear``, SDPA, ``log_softmax``), ``step`` rows of each product at a time: a control that should differ."""
    table = rope_table(len(ids), shape.head, 1e6).to(ids.device)
    cos, sin = (t[:, None] for t in table.chunk(2, 1))

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([F.linear(part, w) for part in x.split(step)])

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()

    x = weights["embedding"][ids]
    for i in range(shape.layers):
        w = {name: weights[f"{i}.{name}"] for name in ("qkv", "o", "gate", "w13", "w2", "norm1", "norm2", "q_norm", "k_norm")}
        q, k, v = shape.heads_of(product(F.rms_norm(x, (shape.hidden,), w["norm1"], EPS), w["qkv"]))
        q, k = turned(F.rms_norm(q, (shape.head,), w["q_norm"], EPS)), turned(F.rms_norm(k, (shape.head,), w["k_norm"], EPS))
        each = shape.heads // shape.kv_heads
        o = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1))), is_causal=True)
        x = x + product(o.transpose(0, 1).flatten(1), w["o"])
        h = F.rms_norm(x, (shape.hidden,), w["norm2"], EPS)
        probs, chosen = product(h, w["gate"]).float().softmax(-1).topk(shape.top_k)
        probs = probs / probs.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            rows, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, rows, product(activation.swiglu(product(h[rows], w["w13"][e])), w["w2"][e]) * probs[rows, place, None].bfloat16())
        x = x + out
    logits = product(F.rms_norm(x, (shape.hidden,), weights["norm"], EPS), weights["head"]).float()
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def _padded(head: Tensor, shard: vocab.VocabShard) -> Tensor:
    """This rank's rows of the head, padding rows NaN: they never count."""
    own = head[shard.first : shard.first + shard.true_rows]
    return torch.cat([own, own.new_full((shard.rows - len(own), head.shape[1]), float("nan"))]) if len(own) < shard.rows else own
