"""Further faults of ``make faults``, behind those of :mod:`planted_faults`: met in public reports, or found by looking hard."""

from __future__ import annotations

from dataclasses import replace

import torch
from planted_model import Model, Plan, weights_of
from planting import BF16, FP32, Draw, Stage, Truth


def log_softmax_narrow(stage: Stage, draw: Draw) -> Truth:
    """23: the log-softmax in bf16, as one operator or step by step."""
    sizes, steps = draw.sizes(), draw.random() < 0.5
    place = draw.choice(["logprob_rows", "logprob"])

    def step(model: Model, usual, logits, target=None, has=None):
        z = logits.to(BF16)
        moved = z - z.amax(-1, keepdim=True)
        table = (moved - moved.exp().sum(-1, keepdim=True).log() if steps else z.log_softmax(-1)).float()
        return table if target is None else torch.where(has, table.gather(1, target[:, None])[:, 0], torch.zeros(()))

    stage.both(sizes, draw.sequences(sizes, 8, 24), Plan(steps={place: step}))
    return Truth("framework", ("logprob-dtype",), (place,))


def log_probabilities(stage: Stage, draw: Draw) -> Truth:
    """24: log-probabilities under labels that are shifted by one, clipped, or with one that is off."""
    sizes = draw.sizes(vocab=128)
    kind = draw.choice(["shifted", "shifted over the pack", "clipped", "one off"])
    at = draw.randrange(7)

    def step(model: Model, usual, logits, target, has):
        out = usual()
        if kind == "clipped":
            return out.clamp_min(-5.0)
        if kind == "one off":
            out = out.clone()
            out[at] += 0.01
            return out
        labels = target.roll(-1)
        if kind == "shifted over the pack":  # the right labels, and the next sequence's token at the last place
            labels, has = target, torch.ones_like(has)
        made = logits.double().log_softmax(-1).float().gather(1, labels[:, None])[:, 0]
        return torch.where(has, made, torch.full((), 0.25))

    stage.both(sizes, draw.sequences(sizes, 8, 24), Plan(steps={"logprob": step}))
    return Truth("framework", ("target-shift",), ("logprob",)) if kind == "shifted" else Truth("unknown", ("",), ("logprob",))


def moved_rows(stage: Stage, draw: Draw) -> Truth:
    """25: rows of experts come out one place on, or in another order, without any padding."""
    sizes = draw.sizes(moe=True)
    place = f"layers.{draw.layer(sizes)}.{draw.choice(['expert_out', 'expert_gate', 'expert_act', 'mlp_out'])}"
    by, mixed = draw.choice([-1, 1, 3]), draw.random() < 0.3
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def step(model: Model, usual, **_):
        out = usual()
        return out[torch.randperm(len(out), generator=noise)] if mixed else out.roll(by, 0)

    stage.both(sizes, draw.sequences(sizes, 8, 24), Plan(steps={place: step}))
    return Truth("framework", ("moved-rows",), (place,))


def narrow_window(stage: Stage, draw: Draw) -> Truth:
    """26: a sliding window that two tokens of a sequence feel, or one: then nothing tells it from a wrong boundary."""
    sizes, felt = draw.sizes(), draw.choice([1, 2])
    place = f"layers.{draw.layer(sizes)}.attn"
    length = draw.randint(9, 20)

    def step(model: Model, usual, q, keys, values, visible, at):
        return model.attention(q, keys, values, visible & (torch.arange(visible.shape[1]) > at[:, None] - (length - felt)))

    sequences = [*draw.sequences(sizes, length, length, count=1), *draw.sequences(sizes, 4, length - felt, count=2)]
    stage.both(sizes, sequences, Plan(steps={place: step}))
    return Truth("framework", ("mask",), (place,)) if felt == 2 else Truth("unknown", ("",), (place,))


def few_rows_of_a_norm(stage: Stage, draw: Draw) -> Truth:
    """27: an epsilon that moves one row of a norm in fp32: too few to tell it from an order."""
    sizes = draw.sizes(dtype=FP32, hidden=96, layers=1)
    part = draw.choice(["attn_norm", "mlp_norm"])
    at = draw.randrange(20)

    def step(model: Model, usual, x, w, **_):
        out = usual().clone()
        r = x[at].double().square().mean().rsqrt().float()
        while bool((x[at].float() * r * w.float() == out[at]).all()):
            r = torch.nextafter(r, r * 2)
        out[at] = x[at].float() * r * w.float()
        return out

    stage.both(sizes, draw.sequences(sizes, 20, 40), Plan(steps={f"layers.0.{part}": step}))
    return Truth("unknown", ("",), (f"layers.0.{part}",))


def other_bias(stage: Stage, draw: Draw) -> Truth:
    """28: a recorded bias of a projection is an old one."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    part = draw.choice(["q_proj", "k_proj", "v_proj", "o_proj"])
    weights = weights_of(sizes, draw.randrange(1 << 30))
    name = f"model.layers.{layer}.self_attn.{part}.bias"
    noise = torch.Generator().manual_seed(draw.randrange(1 << 30))
    bias = torch.randn(len(weights[name.replace("bias", "weight")]), generator=noise).to(sizes.dtype)
    old = (bias.float() + 0.05 * torch.randn(bias.shape, generator=noise)).to(sizes.dtype)

    def adding(model: Model, usual, **_):
        return usual() + model.weight(name)

    place = f"layers.{layer}.{part}"
    plans = [Plan(steps={place: adding}) for _ in "AB"]
    stage.both(sizes, draw.sequences(sizes), *plans, weights=weights | {name: bias}, wrong_weights=weights | {name: old})
    return Truth("weights", ("weights-stale",), (place,), parameter=name)


def all_in_bf16(stage: Stage, draw: Draw) -> Truth:
    """29: a norm without the cast, or the router's softmax, normalisation or choice, wholly in bf16."""
    kind = draw.choice(["norm", "norm", "router", "choice"])
    sizes = draw.sizes(dtype=BF16, moe=True, experts=16)
    layer = draw.layer(sizes)
    if kind == "norm":
        place, behind = f"layers.{layer}.{draw.choice(['attn_norm', 'mlp_norm', 'q_norm'])}", draw.random() < 0.5

        def step(model: Model, usual, x, w, **_):
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return (w * (x * r) if behind else (x * w) * r).flatten(1)

        truth = Truth("framework", ("norm-cast",), (place,))
    elif kind == "router":
        place, normalised = f"layers.{layer}.expert_probs", draw.random() < 0.7

        def step(model: Model, usual, logits, ids):
            p = logits.to(BF16).softmax(-1).gather(1, ids)
            p = p / p.sum(-1, keepdim=True) if normalised else p.float() / p.float().sum(-1, keepdim=True)
            return p.float()

        truth = Truth("framework", ("router-dtype",), (place,))
    else:
        place = f"layers.{layer}.expert_ids"

        def step(model: Model, usual, logits):
            p = logits.to(BF16).softmax(-1)
            return torch.sort(-p.flip(-1), dim=-1, stable=True).indices[:, : model.sizes.top_k].mul(-1).add(model.sizes.experts - 1).sort(-1).values

        truth = Truth("routing", ("tie",), (place,))
    stage.both(sizes, draw.sequences(sizes, 16, 30), Plan(steps={place: step}))
    return truth


def beside_a_rounding(stage: Stage, draw: Draw) -> Truth:
    """30: another scale or other key/value heads where both sides round probabilities or scores: the rounding is no cause."""
    sizes = draw.sizes(dtype=BF16, heads=8, kv=draw.choice([2, 4]))
    place, kind, scores = f"layers.{draw.layer(sizes)}.attn", draw.choice(["scale", "heads"]), draw.random() < 0.5

    def attending(wrong: bool):
        def step(model: Model, usual, q, keys, values, visible, at):
            size, heads, kv = model.sizes.head_dim, model.sizes.heads, model.sizes.kv
            group = torch.arange(heads) % kv if wrong and kind == "heads" else torch.arange(heads) // (heads // kv)
            split = [tensor.double().view(len(tensor), -1, size) for tensor in (q, keys, values)]
            s = torch.einsum("nqd,tqd->nqt", split[0], split[1][:, group]) * (1 / size if wrong and kind == "scale" else size**-0.5)
            s = s.float().to(BF16).double() if scores else s
            p = s.masked_fill(~visible[:, None], float("-inf")).softmax(-1).float().to(BF16).double()
            return torch.einsum("nqt,tqd->nqd", p, split[2][:, group]).float().to(BF16).flatten(1)

        return step

    stage.both(sizes, draw.sequences(sizes, 10, 24), *[Plan(steps={place: attending(wrong)}) for wrong in (True, False)])
    cause = "attention-scale" if kind == "scale" else "head-groups"
    return Truth("framework", (cause,), (place,), details={"axes": [cause]})


GRIDS = {"one scale": (1 << 30, 1 << 30), "a scale per row": (1, 1 << 30), "a scale per block of 128": (128, 128)}
"""Rows and columns that share a scale."""


def there_and_back(weight: torch.Tensor, kind: torch.dtype, grid: str, power: bool) -> torch.Tensor:
    """``weight`` [N, K] through fp8 with scales in fp32, in its own type again."""
    out = torch.empty_like(weight)
    rows, columns = GRIDS[grid]
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            part = weight[top : top + rows, left : left + columns].float()
            scale = part.abs().max() / torch.finfo(kind).max
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if power else scale
            out[top : top + rows, left : left + columns] = ((part / scale).to(kind).float() * scale).to(weight.dtype)
    return out


def quantized_and_back(stage: Stage, draw: Draw) -> Truth:
    """31: a parameter went through fp8 with scales (one, per row, per block of 128; a power of two) and back."""
    sizes = replace(draw.sizes(moe=False, layers=1), hidden=160, width=192)
    weights = weights_of(sizes, draw.randrange(1 << 30))
    name = "model.layers.0." + draw.choice(["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]) + ".weight"
    uneven = torch.exp(torch.randn(len(weights[name]), 1, generator=torch.Generator().manual_seed(1)))
    weights[name] = (weights[name].float() * uneven).to(sizes.dtype)
    kind = draw.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    back = there_and_back(weights[name], kind, draw.choice(list(GRIDS)), draw.random() < 0.4)
    stage.both(sizes, draw.sequences(sizes), Plan(), weights=weights, wrong_weights=weights | {name: back})
    return Truth("weights", ("weights-dtype",), parameter=name)


REPORTED = [
    log_softmax_narrow, log_probabilities, moved_rows, narrow_window, few_rows_of_a_norm, other_bias, all_in_bf16, beside_a_rounding, quantized_and_back,
]  # fmt: skip
