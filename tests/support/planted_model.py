"""A small Qwen3-MoE in plain torch whose every step can be done wrong on purpose, to test the diagnosis. Written apart from its rules.

Legend: n tokens of a pass, T tokens of all sequences, H hidden, Q query heads, G key/value heads, D head size, E experts, K chosen, I width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tio_megatron.traces import Tracer, TraceWriter


@dataclass(frozen=True)
class Sizes:
    """Of a model; ``moe`` says which layers have experts."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv: int = 2
    head_dim: int = 16
    experts: int = 8
    top_k: int = 3
    width: int = 32
    vocab: int = 96
    dtype: torch.dtype = torch.bfloat16
    moe: tuple[bool, ...] = (True, True)
    tied: bool = False
    theta: float = 10000.0

    @property
    def shape(self) -> dict[str, Any]:
        """What a trace says of it."""
        sizes = {"layers": self.layers, "moe": list(self.moe), "tied": self.tied, "hidden": self.hidden, "head_dim": self.head_dim}
        return sizes | {"experts": self.experts, "top_k": self.top_k, "vocab": self.vocab}


def weights_of(sizes: Sizes, seed: int) -> dict[str, torch.Tensor]:
    """HF names; sizes that keep activations near 1 and router logits apart."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.4) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * gain / columns**0.5).to(sizes.dtype)

    def norm(width: int) -> torch.Tensor:
        return (1 + torch.randn(width, generator=draw) / 5).to(sizes.dtype)

    found = {"model.embed_tokens.weight": torch.randn(sizes.vocab, sizes.hidden, generator=draw).to(sizes.dtype), "model.norm.weight": norm(sizes.hidden)}
    if not sizes.tied:
        found["lm_head.weight"] = matrix(sizes.vocab, sizes.hidden, 2.5)
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = norm(sizes.hidden)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv), ("v", sizes.kv)):
            found[f"{at}self_attn.{name}_proj.weight"] = matrix(heads * sizes.head_dim, sizes.hidden)
            if name != "v":
                found[f"{at}self_attn.{name}_norm.weight"] = norm(sizes.head_dim)
        found[f"{at}self_attn.o_proj.weight"] = matrix(sizes.hidden, sizes.heads * sizes.head_dim)
        if sizes.moe[layer]:
            found[f"{at}mlp.gate.weight"] = matrix(sizes.experts, sizes.hidden, 2.0)
        for where in [f"{at}mlp.experts.{e}." for e in range(sizes.experts)] if sizes.moe[layer] else [f"{at}mlp."]:
            found[f"{where}gate_proj.weight"], found[f"{where}up_proj.weight"] = matrix(sizes.width, sizes.hidden), matrix(sizes.width, sizes.hidden)
            found[f"{where}down_proj.weight"] = matrix(sizes.hidden, sizes.width)
    return found


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """fp32, neighbours first."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def pieces(x: torch.Tensor, w: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Partial products over ``n`` runs of the inner axis, each exact and rounded to fp32 once: [n, N] each."""
    return [(a.double() @ b.double().t()).float() for a, b in zip(x.tensor_split(n, -1), w.tensor_split(n, -1), strict=True)]


@dataclass
class Plan:
    """How a run is done. ``steps``: replacements by point name, called as ``step(model, usual, **inputs)``. ``tp``: column slices that are recorded apart.

    ``held``: parameters that the model computes with in place of the recorded ones. ``temperature`` and ``padding_rows`` belong to the head.
    """

    steps: dict[str, Callable[..., torch.Tensor]] = field(default_factory=dict)
    tp: int = 1
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    temperature: float = 1.0
    facts: dict[str, Any] = field(default_factory=dict)
    route_padding: bool = False
    skip: frozenset[str] = frozenset()
    """Points that are not recorded."""


class Model:
    """Runs passes and records them; keys and values of earlier passes are kept, so passes may be chunks."""

    def __init__(self, sizes: Sizes, weights: dict[str, torch.Tensor], plan: Plan | None = None) -> None:
        self.sizes, self.weights, self.plan = sizes, weights, plan or Plan()

    def record(self, folder, sequences, passes=None, keep=True, rank: int = 0) -> None:
        """``passes``: runs of :meth:`Tracer.rows`; by default one pass with all sequences, packed."""
        facts = {"temperature": self.plan.temperature, "norm_eps": 1e-6, "rope_theta": self.sizes.theta, "training": False} | self.plan.facts
        with TraceWriter(folder, sequences, engine="planted", shape=self.sizes.shape, facts=facts, keep=keep, rank=rank) as writer:
            for name, weight in self.weights.items():
                writer.weight(name, weight)
            self.run(Tracer(writer), sequences, passes)

    def run(self, tracer: Tracer, sequences, passes=None) -> None:
        self.tracer = tracer
        self.tokens = torch.cat([torch.tensor(sequence) for sequence in sequences])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        stops = lengths.cumsum(0)
        self.begin = (stops - lengths).repeat_interleave(lengths)
        self.stop = stops.repeat_interleave(lengths)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for runs in passes or [[(i, 0, len(sequence)) for i, sequence in enumerate(sequences)]]:
            with tracer.rows(runs):
                assert tracer.places is not None
                self._forward(tracer.places)

    # one step: the usual way, or the planted one, then recorded
    def _step(self, point: str, usual: Callable[[], torch.Tensor], /, **inputs: Any) -> torch.Tensor:
        planted = self.plan.steps.get(point)
        out = usual() if planted is None else planted(self, usual, **inputs)
        if point not in self.plan.skip:
            self._record(point, out)
        return out

    def _record(self, name: str, out: torch.Tensor) -> None:
        part = name.rsplit(".", 1)[-1]
        if self.plan.tp > 1 and part in ("q_proj", "k_proj", "v_proj", "q_rope", "attn", "gate_proj", "act", "logits", "logprob_rows"):
            at = 0
            for slice_ in out.tensor_split(self.plan.tp, -1):  # what each rank would record
                self.tracer.point(name, slice_, columns=at, width=out.shape[1:])
                at += slice_.shape[-1]
        else:
            self.tracer.point(name, out)

    def weight(self, name: str) -> torch.Tensor:
        return self.plan.held.get(name, self.weights[name])

    def product(self, x: torch.Tensor, w: torch.Tensor, rows: bool = False, out: torch.dtype | None = None) -> torch.Tensor:
        """``rows``: the inner axis is cut over ranks, so it has 8 leaves, joined by a tree whoever holds them."""
        full = tree(pieces(x, w, 8)) if rows and x.shape[-1] % 8 == 0 else pieces(x, w, 1)[0]
        return full.to(out or self.sizes.dtype)

    def norm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        r = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        return (x.float() * r * w.float()).to(self.sizes.dtype)

    def rope(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        size = self.sizes.head_dim
        angle = positions.double()[:, None] * self.sizes.theta ** -(torch.arange(0, size, 2).double() / size)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x.float().view(len(x), heads, size).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.sizes.dtype).view(len(x), -1)

    def visible(self, at: torch.Tensor) -> torch.Tensor:
        """[n, T]"""
        keys = torch.arange(len(self.tokens))
        return (keys >= self.begin[at][:, None]) & (keys <= at[:, None])

    def attention(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        size, group = self.sizes.head_dim, torch.arange(self.sizes.heads) // (self.sizes.heads // self.sizes.kv)
        split = [tensor.double().view(len(tensor), -1, size) for tensor in (q, keys, values)]
        scores = torch.einsum("nqd,tqd->nqt", split[0], split[1][:, group]) * (scale or size**-0.5)
        p = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nqt,tqd->nqd", p, split[2][:, group]).float().to(self.sizes.dtype).flatten(1)

    def _forward(self, places: torch.Tensor) -> None:
        sizes, at = self.sizes, places.clamp_min(0)
        real = places >= 0
        positions = self._step("positions", lambda: torch.where(real, at - self.begin[at], 0), at=at)
        x = self._step("embed", lambda: F.embedding(self.tokens[at], self.weight("model.embed_tokens.weight")), at=at)
        for layer in range(sizes.layers):
            x = self._layer(layer, x, positions, places, at, real)
        h = self._step("final_norm", lambda: self.norm(x, self.weight("model.norm.weight")), x=x)
        head = self.weight("model.embed_tokens.weight" if sizes.tied else "lm_head.weight")
        logits = self._step("logits", lambda: self.product(h, head, out=torch.float32), x=h, w=head)
        table = self._step("logprob_rows", lambda: (logits.double() / self.plan.temperature).log_softmax(-1).float(), logits=logits)
        target = self.tokens[(at + 1).clamp_max(len(self.tokens) - 1)]
        has = real & (at + 1 < self.stop[at])
        logprob = torch.where(has, table.gather(1, target[:, None])[:, 0], torch.zeros(()))
        self._step("logprob", lambda: logprob, logits=logits, target=target, has=has)

    def _layer(self, layer: int, x: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, at: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        sizes, here, there = self.sizes, f"layers.{layer}.", f"model.layers.{layer}."

        def w(name: str) -> torch.Tensor:
            return self.weight(f"{there}{name}.weight")

        h = self._step(f"{here}attn_norm", lambda: self.norm(x, w("input_layernorm")), x=x, w=w("input_layernorm"))
        made = {}
        for name in "qkv":
            made[name] = self._step(f"{here}{name}_proj", lambda name=name: self.product(h, w(f"self_attn.{name}_proj")), x=h, w=w(f"self_attn.{name}_proj"))
        for name in "qk":
            weight, split = w(f"self_attn.{name}_norm"), made[name].view(len(h), -1, sizes.head_dim)
            normed = self._step(f"{here}{name}_norm", lambda split=split, weight=weight: self.norm(split, weight).flatten(1), x=split, w=weight)
            heads = sizes.heads if name == "q" else sizes.kv
            made[name] = self._step(
                f"{here}{name}_rope", lambda normed=normed, heads=heads: self.rope(normed, positions, heads), x=normed, positions=positions, heads=heads
            )
        keys = self.keys.setdefault(layer, torch.zeros(len(self.tokens), made["k"].shape[1], dtype=sizes.dtype))
        values = self.values.setdefault(layer, torch.zeros(len(self.tokens), made["v"].shape[1], dtype=sizes.dtype))
        keys[at[real]], values[at[real]] = made["k"][real], made["v"][real]
        seen = self.visible(at)
        out = self._step(f"{here}attn", lambda: self.attention(made["q"], keys, values, seen), q=made["q"], keys=keys, values=values, visible=seen, at=at)
        o = self._step(f"{here}o_proj", lambda: self.product(out, w("self_attn.o_proj"), rows=True), x=out, w=w("self_attn.o_proj"), at=at)
        residual = self._step(f"{here}attn_residual", lambda: x + o, x=x, y=o)
        h = self._step(
            f"{here}mlp_norm", lambda: self.norm(residual, w("post_attention_layernorm")), x=residual, w=w("post_attention_layernorm"), stream=x, branch=o
        )
        mlp = self._experts(layer, h, places) if sizes.moe[layer] else self._dense(layer, h, at)
        return self._step(f"{here}mlp_residual", lambda: residual + mlp, x=residual, y=mlp)

    def _dense(self, layer: int, h: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        here, there = f"layers.{layer}.", f"model.layers.{layer}.mlp."
        halves = []
        for name in ("gate", "up"):
            weight = self.weight(f"{there}{name}_proj.weight")
            halves.append(self._step(f"{here}{name}_proj", lambda weight=weight: self.product(h, weight), x=h, w=weight))
        act = self._step(f"{here}act", lambda: self.swiglu(*halves), gate=halves[0], up=halves[1])
        down = self.weight(f"{there}down_proj.weight")
        return self._step(f"{here}mlp_out", lambda: self.product(act, down, rows=True), x=act, w=down, at=at)

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (F.silu(gate.double()).float() * up.float()).to(self.sizes.dtype)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Lower id first among equals; ascending ids."""
        return torch.sort(-logits.double(), dim=-1, stable=True).indices[:, : self.sizes.top_k].sort(-1).values

    def _experts(self, layer: int, h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        here = f"layers.{layer}."
        gate = self.weight(f"model.layers.{layer}.mlp.gate.weight")
        logits = self._step(f"{here}router_logits", lambda: self.product(h, gate, out=torch.float32), x=h, w=gate)
        ids = self._step(f"{here}expert_ids", lambda: self.choose(logits), logits=logits)

        def probabilities() -> torch.Tensor:
            p = logits.softmax(-1).gather(1, ids)
            return p / p.sum(-1, keepdim=True)

        probs = self._step(f"{here}expert_probs", probabilities, logits=logits, ids=ids)
        parts = [
            self._step(f"{here}expert_{name}", lambda name=name: self._each(layer, name, h, ids), x=h, ids=ids, layer=layer, name=name)
            for name in ("gate", "up")
        ]
        act = self._step(f"{here}expert_act", lambda: self.swiglu(*parts), gate=parts[0], up=parts[1])
        out = self._step(f"{here}expert_out", lambda: self._each(layer, "down", act, ids), x=act, ids=ids, layer=layer, name="down", places=places)
        return self._step(f"{here}mlp_out", lambda: self.combine(out, probs, ids), out=out, probs=probs, ids=ids, places=places)

    def _each(self, layer: int, name: str, x: torch.Tensor, ids: torch.Tensor, product: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """[n, K, ...]: a product with each token's experts; ``x`` [n, H] or [n, K, I]."""
        product = product or (lambda x, w: self.product(x, w, rows=name == "down"))
        shape = self.weight(f"model.layers.{layer}.mlp.experts.0.{name}_proj.weight").shape
        out = torch.zeros(*ids.shape, shape[0], dtype=self.sizes.dtype)
        for expert in range(self.sizes.experts):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            if len(rows):
                given = x[rows, slots] if x.dim() == 3 else x[rows]
                out[rows, slots] = product(given, self.weight(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"))
        return out

    def combine(self, out: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The balanced tree over the expert axis."""
        leaves: list[torch.Tensor | None] = []
        weighted = out.float() * probs.float()[..., None]
        rows = []
        for row in range(len(out)):
            leaves = [None] * self.sizes.experts
            for k, expert in enumerate(ids[row].tolist()):
                leaves[expert] = weighted[row, k]
            while len(leaves) > 1:
                pairs = [(leaves[i], leaves[i + 1] if i + 1 < len(leaves) else None) for i in range(0, len(leaves), 2)]
                leaves = [a if b is None else b if a is None else a + b for a, b in pairs]
            rows.append(leaves[0])
        return torch.stack(rows).to(self.sizes.dtype)
