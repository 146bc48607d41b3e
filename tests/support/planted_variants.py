"""Further variants of the kinds in :mod:`planted_faults`, at other places and combined with a change of the layout: nothing in the diagnosis knows them.

Each draws its place, sizes, layer, type, magnitude and side anew, cuts the sides' columns over random ranks, and says what is right.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planted_faults import FAULTS
from planted_model import Model, Plan, weights_of
from planted_variants_experts import dropped, other_experts, router_dtype, rows_never_stored, stale_copy_elsewhere, weighted_early, weights_elsewhere
from planting import BF16, FP32, Draw, Stage, Truth

from tio_megatron.traces import Trace, open_trace

FP16 = torch.float16


class CutStage(Stage):
    """As :class:`Stage`, the two sides cut over ranks by chance."""

    def both(self, sizes, sequences, wrong: Plan, right: Plan | None = None, **more):
        def cut(plan: Plan) -> Plan:
            tp = self.draw.choice([1, 2, 4])
            return replace(plan, tp=tp, facts={"layout": {"tp": tp}} | plan.facts)

        super().both(sizes, sequences, cut(wrong), cut(right or Plan()), **more)


def chance(draw: Draw) -> torch.dtype:
    return draw.choice([BF16, FP32])


def norm_place(draw: Draw, sizes) -> str:
    return draw.choice([f"layers.{draw.layer(sizes)}.{part}" for part in ("attn_norm", "mlp_norm", "q_norm", "k_norm")] + ["final_norm"])


def norm_step(function: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]):
    def step(model: Model, usual, x, w=None, **_):
        w = model.weight("model.norm.weight") if w is None else w
        return function(x, w, model.sizes.dtype).flatten(1)

    return step


def epsilon(stage: Stage, draw: Draw) -> Truth:
    """another epsilon in a norm."""
    sizes = draw.sizes(dtype=FP32)
    place, eps = norm_place(draw, sizes), draw.choice([1e-5, 1e-3, 1e-8])

    def norm(x, w, dtype):
        return (x.float() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt().float() * w.float()).to(dtype)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: norm_step(norm)}))
    return Truth("framework", ("norm-epsilon",) if eps > 1e-7 else ("norm-epsilon", "order"), (place,))


def norm_form(stage: Stage, draw: Draw) -> Truth:
    """a norm with 1 + w, without its weight, or with its mean taken off."""
    sizes = draw.sizes(dtype=draw.choice([BF16, FP32, FP16]))
    place, kind = norm_place(draw, sizes), draw.choice(["1 + w", "none", "mean"])

    def norm(x, w, dtype):
        v = x.float() - x.float().mean(-1, keepdim=True) if kind == "mean" else x.float()
        r = (v.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        return (v * r * {"1 + w": 1 + w.float(), "none": torch.ones_like(w.float()), "mean": w.float()}[kind]).to(dtype)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: norm_step(norm)}))
    return Truth("framework", ("norm-mean" if kind == "mean" else "norm-weight",), (place,))


def norm_cast_fp16(stage: Stage, draw: Draw) -> Truth:
    """16 in fp16, or all of the norm in the narrow type."""
    sizes = draw.sizes(dtype=draw.choice([FP16, BF16]))
    place, low = norm_place(draw, sizes), draw.random() < 0.5

    def norm(x, w, dtype):
        r = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        if low:
            return x * r.to(dtype) * w
        return (x.float() * r).to(dtype) * w

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: norm_step(norm)}))
    return Truth("framework", ("norm-cast",), (place,))


def rope_form(stage: Stage, draw: Draw) -> Truth:
    """18 and its neighbours: another theta, other pairs, positions off by one, in queries or keys alone."""
    sizes = draw.sizes(head_dim=draw.choice([8, 16, 32]))
    kind, part, layer = draw.choice(["theta", "pairs", "later"]), draw.choice(["q_rope", "k_rope"]), draw.layer(sizes)
    place, theta = f"layers.{layer}.{part}", draw.choice([500000.0, 1000000.0])

    def step(model: Model, usual, x, positions, heads):
        size = model.sizes.head_dim
        at = positions.double() + (kind == "later")
        angle = at[:, None] * (theta if kind == "theta" else model.sizes.theta) ** -(torch.arange(0, size, 2).double() / size)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        wide = x.float().view(len(x), heads, size)
        a, b = wide.chunk(2, -1) if kind != "pairs" else (wide[..., 0::2], wide[..., 1::2])
        turned = (a * cos - b * sin, b * cos + a * sin)
        out = torch.cat(turned, -1) if kind != "pairs" else torch.stack(turned, -1)
        return out.to(model.sizes.dtype).reshape(len(x), -1)

    stage.both(sizes, draw.sequences(sizes, 10, 40), Plan(steps={place: step}))
    return Truth("framework", ({"theta": "rope-theta", "pairs": "rope-pairs", "later": "positions"}[kind],), (place,))


def attending(change: Callable[..., Any]):
    def step(model: Model, usual, q, keys, values, visible, at):
        size, group = model.sizes.head_dim, torch.arange(model.sizes.heads) // (model.sizes.heads // model.sizes.kv)
        split = [tensor.double().view(len(tensor), -1, size) for tensor in (q, keys, values)]
        seen, scale, group, finish = change(model, visible, at, size**-0.5, group)
        scores = torch.einsum("nqd,tqd->nqt", split[0], split[1][:, group]) * scale
        p = finish(scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), model.sizes.dtype)
        return torch.einsum("nqt,tqd->nqd", p, split[2][:, group]).float().to(model.sizes.dtype).flatten(1)

    return step


def as_is(p, dtype):
    return p


def mask(stage: Stage, draw: Draw) -> Truth:
    """10 and its neighbours: a sliding window, no causality, one token more or less."""
    sizes = draw.sizes()
    place, kind, width = f"layers.{draw.layer(sizes)}.attn", draw.choice(["window", "all", "one more", "not itself"]), draw.randint(2, 7)

    def change(model, visible, at, scale, group):
        keys = torch.arange(visible.shape[1])
        own = (keys >= model.begin[at][:, None]) & (keys < model.stop[at][:, None])
        seen = {
            "window": visible & (keys > at[:, None] - width),
            "all": own,
            "one more": own & (keys <= at[:, None] + 1),
            "not itself": visible & ((keys < at[:, None]) | (keys == model.begin[at][:, None])),
        }[kind]
        return seen, scale, group, as_is

    stage.both(sizes, draw.sequences(sizes, 14, 30), Plan(steps={place: attending(change)}))
    return Truth("framework", ("mask",), (place,))


def attention_form(stage: Stage, draw: Draw) -> Truth:
    """another scale, other key/value heads, or probabilities rounded before they meet the values."""
    sizes = draw.sizes(heads=8, kv=draw.choice([2, 4]))
    place, kind = f"layers.{draw.layer(sizes)}.attn", draw.choice(["scale", "heads", "rounded"])

    def change(model, visible, at, scale, group):
        strided = torch.arange(model.sizes.heads) % model.sizes.kv
        finish = (lambda p, dtype: p.float().to(BF16).double()) if kind == "rounded" else as_is
        return visible, (scale**2 if kind == "scale" else scale), (strided if kind == "heads" else group), finish

    if kind == "rounded":
        sizes = replace(sizes, dtype=BF16)
    stage.both(sizes, draw.sequences(sizes, 10, 24), Plan(steps={place: attending(change)}))
    return Truth("framework", ({"scale": "attention-scale", "heads": "head-groups", "rounded": "extra-rounding"}[kind],), (place,))


def head_form(stage: Stage, draw: Draw) -> Truth:
    """15 and 17's neighbours: filtered, rounded, or other tokens' log-probabilities."""
    sizes = draw.sizes()
    kind = draw.choice(["top-k", "bf16 logits", "bf16 result"])

    def step(model: Model, usual, logits):
        z = logits.double()
        if kind == "top-k":
            z = z.masked_fill(z < z.topk(20, -1).values[:, -1:], float("-inf"))
        if kind == "bf16 logits":
            z = logits.to(BF16).double()
        out = z.log_softmax(-1).float()
        return out.to(BF16).float() if kind == "bf16 result" else out

    stage.both(sizes, draw.sequences(sizes), Plan(steps={"logprob_rows": step}))
    return Truth("framework", ({"top-k": "sampling-filter"}.get(kind, "logprob-dtype"),), ("logprob_rows", "logprob"))


def two_temperatures(stage: Stage, draw: Draw) -> Truth:
    """15 with a temperature on both sides."""
    sizes = draw.sizes()
    values = draw.sample([0.5, 0.65, 0.85, 1.1, 1.4, 2.0], 2)
    plans = [Plan(temperature=value, facts={} if draw.random() < 0.5 else {"temperature": 1.0}) for value in values]
    stage.both(sizes, draw.sequences(sizes), *plans)
    return Truth("framework", ("temperature",), ("logprob_rows", "logprob"), details={"temperature": values[0]})


def large_vocabulary_padding(stage: Stage, draw: Draw) -> Truth:
    """17 with few or many rows, whose logits are zero or small."""
    sizes = draw.sizes(tied=False, vocab=draw.choice([33, 200, 301]))
    more, scale = draw.choice([3, 128, 500]), draw.choice([0.0, 0.2])
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def step(model: Model, usual, logits):
        extra = torch.randn(len(logits), more, generator=noise).double() * scale
        return torch.cat([logits.double(), extra], -1).log_softmax(-1)[:, : model.sizes.vocab].float()

    stage.both(sizes, draw.sequences(sizes), Plan(steps={"logprob_rows": step}, facts={"vocab_rows": sizes.vocab + more} if draw.random() < 0.5 else {}))
    return Truth("framework", ("vocab-padding",), ("logprob_rows", "logprob"))


def rounding_elsewhere(stage: Stage, draw: Draw) -> Truth:
    """13 in other places: a result of an fp32 model that goes through bf16."""
    sizes = draw.sizes(dtype=FP32)
    layer = draw.layer(sizes)
    parts = [
        "o_proj",
        "q_proj",
        "v_proj",
        "attn",
        "attn_residual",
        "mlp_residual",
        "q_rope",
        "attn_norm",
        "mlp_out",
        "expert_act" if sizes.moe[layer] else "act",
    ]
    place = f"layers.{layer}.{draw.choice(parts)}"
    narrow = draw.choice([BF16, FP16])

    def step(model: Model, usual, **_):
        return usual().to(narrow).float()

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: step}))
    return Truth("framework", ("extra-rounding", "dtype", "norm-cast"), (place,))


def garbage(stage: Stage, draw: Draw) -> Truth:
    """12 with junk that is a number, or zeros: rows that hold what was in the memory before."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    place = f"layers.{layer}." + draw.choice(["o_proj", "attn", "mlp_out", "q_proj", "act" if not sizes.moe[layer] else "mlp_out"])
    sequences = draw.sequences(sizes, 10, 30, count=3)
    rows = draw.sample(range(sum(map(len, sequences))), draw.randint(1, 5))
    kind = draw.choice(["zero", "huge", "noise"])
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def step(model: Model, usual, **_):
        out = usual().clone()
        drawn = torch.randn(out[rows].shape, generator=noise).to(out.dtype)
        out[rows] = {"zero": torch.zeros_like(drawn), "huge": torch.full_like(drawn, 3e4), "noise": drawn}[kind]
        return out

    stage.both(sizes, sequences, Plan(steps={place: step}))
    return Truth("framework", ("unwritten",), (place,))


def dropout_elsewhere(stage: Stage, draw: Draw) -> Truth:
    """22: dropout behind other operators, at other rates."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    parts = ["q_proj", "attn_norm", "o_proj", "mlp_out", "expert_act" if sizes.moe[layer] else "act", "attn"]
    place, rate = f"layers.{layer}.{draw.choice(parts)}", draw.choice([0.05, 0.1, 0.25, 0.5])
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def step(model: Model, usual, **_):
        out = usual()
        return (out.float() * (torch.rand(out.shape, generator=noise) >= rate) / (1 - rate)).to(out.dtype)

    stage.both(sizes, draw.sequences(sizes, 10, 24), Plan(steps={place: step}, facts={"training": True} if draw.random() < 0.3 else {}))
    return Truth("framework", ("dropout",), (place,))


def residual_form(stage: Stage, draw: Draw) -> Truth:
    """a branch that is added twice, or not at all; halves of the gated unit swapped; another activation."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    kind = draw.choice(["twice", "left out", "swapped", "gelu", "quick gelu"])
    if kind in ("twice", "left out"):
        place = f"layers.{layer}.{draw.choice(['attn_residual', 'mlp_residual'])}"

        def step(model: Model, usual, x, y):
            return x + 2 * y if kind == "twice" else x.clone()
    else:
        place = f"layers.{layer}.{'expert_act' if sizes.moe[layer] else 'act'}"

        def step(model: Model, usual, gate, up):
            if kind == "swapped":
                return model.swiglu(up, gate)
            x = gate.double()
            other = F.gelu(x) if kind == "gelu" else x * torch.sigmoid(1.702 * x)
            return (other.float() * up.float()).to(model.sizes.dtype)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: step}))
    return Truth("framework", ({"swapped": "gate-up-swapped", "gelu": "activation", "quick gelu": "activation"}.get(kind, "residual-terms"),), (place,))


def two_at_once(stage: Stage, draw: Draw) -> Truth:
    """two faults in one run: the first in the order of computation is named."""
    sizes = draw.sizes(layers=3, moe=True, dtype=BF16)
    first, second = sorted(draw.sample(range(3), 2))
    norm = f"layers.{first}.attn_norm"

    def cast(x, w, dtype):
        return (x.float() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()).to(dtype) * w

    def after_top_k(model: Model, usual, logits, ids):
        return logits.gather(1, ids).softmax(-1).to(BF16).float()

    def dropped(model: Model, usual, **_):
        return usual() * (torch.rand(()) > -1) * 0

    steps = {norm: norm_step(cast), f"layers.{second}.expert_probs": after_top_k, f"layers.{second}.mlp_out": dropped}
    wrong = {f"model.layers.{second}.self_attn.v_proj.weight": 0}
    weights = weights_of(sizes, draw.randrange(1 << 30))
    changed = {name: w.roll(1, 0) if name in wrong else w for name, w in weights.items()}
    stage.both(sizes, draw.sequences(sizes), Plan(steps=steps, temperature=0.7), weights=weights, wrong_weights=changed)
    return Truth("framework", ("norm-cast",), (norm,))


VARIANTS: list[Callable[[Stage, Draw], Truth]] = [
    epsilon, norm_form, norm_cast_fp16, rope_form, mask, attention_form, head_form, two_temperatures, large_vocabulary_padding, rounding_elsewhere,
    router_dtype, other_experts, dropped, garbage, dropout_elsewhere, weights_elsewhere, stale_copy_elsewhere, residual_form,
    two_at_once, weighted_early, rows_never_stored,
]  # fmt: skip


def plant_variant(index: int, seed: int, folder: Path) -> Truth:
    """As :func:`planted_faults.plant`, of :data:`VARIANTS`, behind which come all faults with their columns cut."""
    draw = Draw(50_000 * (index + 1) + seed)
    makers = [*VARIANTS, *FAULTS]
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        stage = CutStage(folder, draw)
        truth = replace(makers[index](stage, draw), side=stage.faulty)
        traces = open_trace(folder / "A"), open_trace(folder / "B")
        if not all(isinstance(trace, Trace) for trace in traces):
            return truth
        differing = [int((traces[0].digests(name) != traces[1].digests(name)).sum()) for name in traces[0].names if name in traces[1].recorded]
        if next((rows for rows in differing if rows), 0) >= truth.least:
            return truth
