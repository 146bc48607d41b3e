"""Variants of :mod:`planted_variants` in the router, in experts, and in weights."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from planted_model import Model, Plan, weights_of
from planting import BF16, FP32, Draw, Stage, Truth

FP16 = torch.float16


def router_dtype(stage: Stage, draw: Draw) -> Truth:
    """8's neighbours: probabilities or logits in bf16, a sigmoid, a scale."""
    sizes = draw.sizes(moe=True)
    place, kind = f"layers.{draw.layer(sizes)}.expert_probs", draw.choice(["logits", "result", "sigmoid", "bf16 softmax"])

    def step(model: Model, usual, logits, ids):
        given = logits.to(BF16).float() if kind == "logits" else logits
        p = (given.to(BF16).softmax(-1).float() if kind == "bf16 softmax" else given.sigmoid() if kind == "sigmoid" else given.softmax(-1)).gather(1, ids)
        p = p / p.sum(-1, keepdim=True)
        return p.to(BF16).float() if kind == "result" else p

    stage.both(sizes, draw.sequences(sizes, 8, 24), Plan(steps={place: step}))
    causes = {"sigmoid": ("router-softmax",), "bf16 softmax": ("router-softmax", "router-dtype")}
    return Truth("framework", causes.get(kind, ("router-dtype", "extra-rounding")), (place,))


def other_experts(stage: Stage, draw: Draw) -> Truth:
    """7's neighbour: a bias, or groups, decide about the experts."""
    sizes = draw.sizes(moe=True, experts=16)
    place, kind = f"layers.{draw.layer(sizes)}.expert_ids", draw.choice(["bias", "groups"])
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def step(model: Model, usual, logits):
        if kind == "bias":
            given = logits + torch.randn(16, generator=noise)
        else:
            best = logits.view(-1, 4, 4).amax(-1).topk(2, -1).indices
            given = logits.masked_fill(~F.one_hot(best, 4).sum(1).bool().repeat_interleave(4, -1), -1e9)
        return given.topk(model.sizes.top_k, -1).indices.sort(-1).values

    stage.both(sizes, draw.sequences(sizes, 8, 24), Plan(steps={place: step}))
    return Truth("routing", ("router-choice",), (place,))


def dropped(stage: Stage, draw: Draw) -> Truth:
    """9 without padding: a capacity drops tokens of a full expert, or their rows are another token's."""
    sizes = draw.sizes(moe=True)
    place, part = f"layers.{draw.layer(sizes)}.{draw.choice(['expert_out', 'expert_act', 'expert_gate'])}", draw.uniform(0.15, 0.5)

    def step(model: Model, usual, ids=None, places=None, **_):
        out = usual().clone()
        chosen = model.chosen
        limit = max(1, round(part * len(out)))
        for expert in range(model.sizes.experts):
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out[rows[limit:], slots[limit:]] = 0
        return out

    layer = place.split(".")[1]

    def remember(model: Model, usual, logits):
        model.chosen = usual()
        return model.chosen

    stage.both(sizes, draw.sequences(sizes, 10, 24), Plan(steps={place: step, f"layers.{layer}.expert_ids": remember}))
    return Truth("framework", ("dropped-tokens",), (place,))


def weights_elsewhere(stage: Stage, draw: Draw) -> Truth:
    """21 and 22: any parameter, swapped with another, scaled, in fp8, with its rows in another order, or NaN."""
    sizes = draw.sizes(dtype=draw.choice([BF16, FP32]))
    weights = weights_of(sizes, draw.randrange(1 << 30))
    kind = draw.choice(["moved", "scaled", "fp8", "fp16", "rows", "nan", "zero", "old"])
    matrices = [name for name, w in weights.items() if w.dim() == 2]
    if kind == "fp16":
        sizes = replace(sizes, dtype=FP32)
        weights = {name: w.float() for name, w in weights_of(sizes, 5).items()}
    names = list(weights) if kind in ("scaled", "nan", "old", "zero") else matrices
    name = draw.choice(names)
    w = weights[name]
    changed = dict(weights)
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if kind == "moved":
        like = [other for other in matrices if other != name and weights[other].shape == w.shape]
        if not like:
            kind = "zero"
        else:
            other = draw.choice(like)
            changed[name], changed[other] = weights[other], w
    if kind == "scaled":
        changed[name] = (w.float() * draw.choice([0.5, 2.0, 1.25])).to(w.dtype)
    elif kind == "fp8":
        changed[name] = w.to(draw.choice([torch.float8_e4m3fn, torch.float8_e5m2])).to(w.dtype)
    elif kind == "fp16":
        changed[name] = w.to(FP16).to(w.dtype)
    elif kind == "rows":
        changed[name] = w[torch.randperm(len(w), generator=noise)]
    elif kind == "nan":
        changed[name] = w.clone()
        changed[name].view(-1)[:: max(1, w.numel() // 7)] = float("nan")
    elif kind == "zero":
        changed[name] = torch.zeros_like(w)
    elif kind == "old":
        changed[name] = (w.float() + draw.choice([0.01, 0.1, 0.3]) * w.float().std() * torch.randn(w.shape, generator=noise)).to(w.dtype)
    sequences = [list(range(sizes.vocab)), *draw.sequences(sizes)]  # every token and, for most draws, every expert is used
    stage.both(sizes, sequences, Plan(), weights=weights, wrong_weights=changed)
    causes = {
        "moved": ("weights-moved",), "scaled": ("weights-scaled",), "fp8": ("weights-dtype",), "fp16": ("weights-dtype",), "rows": ("weights-rows",),
        "nan": ("weights-missing",), "zero": ("weights-missing",), "old": ("weights-stale",),
    }  # fmt: skip
    both = [name] + ([other] if kind == "moved" else [])
    return Truth("weights", causes[kind], details={"parameters": both})


def stale_copy_elsewhere(stage: Stage, draw: Draw) -> Truth:
    """21: any product computes with an old copy, or with another layer's."""
    sizes = draw.sizes(layers=draw.choice([2, 3]), moe=draw.random() < 0.5)
    layer = draw.layer(sizes)
    weights = weights_of(sizes, draw.randrange(1 << 30))
    at, there = f"model.layers.{layer}.", f"model.layers.{(layer + 1) % sizes.layers}."
    name = draw.choice(["q", "k", "v", "o"])
    other = weights[f"{there}self_attn.{name}_proj.weight"]
    mine = weights[f"{at}self_attn.{name}_proj.weight"]
    old = (mine.float() * (1 + 0.3 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)))).to(mine.dtype)
    swapped = draw.random() < 0.5
    stage.both(sizes, draw.sequences(sizes), Plan(held={f"{at}self_attn.{name}_proj.weight": other if swapped else old}), weights=weights)
    causes = ("weights-moved",) if swapped else ("stale-copy",)
    return Truth("weights", causes, (f"layers.{layer}.{name}_proj",), parameter=f"{at}self_attn.{name}_proj.weight")


def weighted_early(stage: Stage, draw: Draw) -> Truth:
    """one engine multiplies an expert's row by its probability before the down projection, as stock Megatron does."""
    sizes = draw.sizes(moe=True, dtype=draw.choice([BF16, FP32, FP16]))
    layer = draw.layer(sizes)
    held: dict[str, torch.Tensor] = {}

    def probabilities(model: Model, usual, logits, ids):
        held["p"], held["ids"] = usual(), ids
        return held["p"]

    def combined(model: Model, usual, out, probs, ids, places):
        scaled = (held["act"].float() * probs[..., None]).to(model.sizes.dtype)
        rows = model._each(layer, "down", scaled, ids)
        model.tracer.point(f"layers.{layer}.expert_scaled", scaled)
        model.tracer.point(f"layers.{layer}.expert_scaled_out", rows)
        return rows.float().sum(1).to(model.sizes.dtype)

    def activation(model: Model, usual, gate, up):
        held["act"] = usual()
        return held["act"]

    here = f"layers.{layer}."
    steps = {f"{here}expert_probs": probabilities, f"{here}expert_act": activation, f"{here}mlp_out": combined}
    stage.both(sizes, draw.sequences(sizes), Plan(steps=steps, skip=frozenset({f"{here}expert_out"})))
    return Truth("framework", ("expert-weighting",), (f"{here}mlp_out",))


def rows_never_stored(stage: Stage, draw: Draw) -> Truth:
    """13 inside a fused operator: rows of experts are weighted and added without being rounded first."""
    sizes = draw.sizes(moe=True, dtype=BF16)
    layer = draw.layer(sizes)
    held: dict[str, torch.Tensor] = {}

    def activation(model: Model, usual, gate, up):
        held["act"] = usual()
        return held["act"]

    def fused(model: Model, usual, out, probs, ids, places):
        total = torch.zeros(len(out), model.sizes.hidden)
        for k in range(ids.shape[1]):
            rows = []
            for row, expert in enumerate(ids[:, k].tolist()):
                w = model.weight(f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight")
                rows.append((w.double() @ held["act"][row, k].double()).float() * probs[row, k])
            total = total + torch.stack(rows)
        return total.to(BF16)

    here = f"layers.{layer}."
    stage.both(sizes, draw.sequences(sizes), Plan(steps={f"{here}expert_act": activation, f"{here}mlp_out": fused}))
    return Truth("framework", ("extra-rounding",), (f"{here}mlp_out",))
