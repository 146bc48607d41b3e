"""A planted fault for every row of the list of field reports, and clean pairs. Place, size, layer, type and side are drawn anew for every seed.

Each fault makes two traces of which one side does something wrong, and says which kind, cause and place are right. The diagnosis never sees that.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planted_model import Model, Plan, pieces, weights_of
from planted_orders import (
    micro_batch,
    partial_sums_in_bf16,
    pieces_in_another_order,
    ring_starts_at_the_owner,
    sequence_parallel,
    size_of_the_message,
    token_owner_against_expert_owner,
)
from planted_reports import REPORTED
from planting import BF16, FP32, Draw, Stage, Truth

from tio_megatron.traces import Trace, Tracer, TraceWriter, open_trace


def fused_add_norm(stage: Stage, draw: Draw) -> Truth:
    """6: the fused add and norm takes the variance (or everything) of the unrounded sum."""
    sizes = draw.sizes(dtype=BF16)
    place = f"layers.{draw.layer(sizes)}.mlp_norm"
    everything = draw.random() < 0.5

    def step(model: Model, usual, x, w, stream, branch):
        total = stream.float() + branch.float()
        r = (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        return ((total if everything else x.float()) * r * w.float()).to(BF16)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: step}))
    return Truth("framework", ("residual-rounding",), (place,))


def tie(stage: Stage, draw: Draw) -> Truth:
    """7: two experts tie at rank k."""
    sizes = draw.sizes(moe=True)
    layer = draw.layer(sizes)
    name, place = f"model.layers.{layer}.mlp.gate.weight", f"layers.{layer}.expert_ids"
    weights = weights_of(sizes, draw.randrange(1 << 30))
    gate = weights[name].clone()
    for pair in range(0, sizes.experts - 1, 2):
        gate[pair + 1] = gate[pair]  # equal logits for pairs of experts
    weights[name] = gate
    rounded = draw.random() < 0.4

    def higher(model: Model, usual, logits):
        given = logits.to(BF16).float() if rounded else logits
        flipped = torch.sort(-given.double().flip(-1), dim=-1, stable=True).indices[:, : model.sizes.top_k]
        return (model.sizes.experts - 1 - flipped).sort(-1).values

    stage.both(sizes, draw.sequences(sizes, 12, 30), Plan(steps={place: higher}), weights=weights)
    return Truth("routing", ("tie",), (place,))


def router_softmax(stage: Stage, draw: Draw) -> Truth:
    """8: softmax before against after top-k, or the normalisation summed in another order, or left out."""
    sizes = draw.sizes(moe=True, top_k=draw.choice([3, 4]), experts=16)
    place = f"layers.{draw.layer(sizes)}.expert_probs"
    kind = draw.choice(["after", "none", "order"])

    def step(model: Model, usual, logits, ids):
        if kind == "after":
            return logits.gather(1, ids).softmax(-1)
        p = logits.softmax(-1).gather(1, ids)
        if kind == "none":
            return p
        total = torch.zeros(len(p), 1)
        for k in range(p.shape[1]):
            total = total + p.sort(-1, descending=True).values[:, k : k + 1]
        return p / total

    def ascending(model: Model, usual, logits, ids):
        p = logits.softmax(-1).gather(1, ids)
        total = torch.zeros(len(p), 1)
        for k in range(p.shape[1]):
            total = total + p[:, k : k + 1]
        return p / total

    right = Plan(steps={place: ascending}) if kind == "order" else None
    stage.both(sizes, draw.sequences(sizes, 12, 30), Plan(steps={place: step}), right)
    causes = {"after": "router-softmax", "none": "router-normalise", "order": "router-sum-order"}
    return Truth("framework", (causes[kind],), (place,))


def padding_is_routed(stage: Stage, draw: Draw) -> Truth:
    """9: padding tokens fill an expert's places, so that real tokens fall out, or move its rows."""
    sizes = draw.sizes(moe=True)
    place = f"layers.{draw.layer(sizes)}.expert_out"
    sequences = draw.sequences(sizes, 6, 20)
    padded = [[(i, 0, len(sequence)), draw.randint(2, 9)] for i, sequence in enumerate(sequences)]
    shifted = draw.random() < 0.5
    part = draw.uniform(0.2, 0.5)

    def step(model: Model, usual, x, ids, places, **_):
        out = usual()
        real = int((places >= 0).sum())
        if shifted:  # rows of real tokens come out one further
            moved = out.clone()
            moved[1:real] = out[: real - 1]
            return moved
        limit = max(1, round(part * real))
        for expert in range(model.sizes.experts):
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            full = rows >= limit
            out[rows[full], slots[full]] = 0
        return out

    passes = [[runs[0]] for runs in padded]
    stage.both(sizes, sequences, Plan(steps={place: step}, facts={"padding_routed": sum(runs[1] for runs in padded)}), passes=passes, wrong_passes=padded)
    return Truth("framework", ("padding",), (place,))


def packing(stage: Stage, draw: Draw) -> Truth:
    """10: a packed sequence sees its neighbour, or boundaries come from padded lengths."""
    sizes = draw.sizes()
    place = f"layers.{draw.layer(sizes)}.attn"
    kind = draw.choice(["none", "padded lengths", "positions"])
    sequences = draw.sequences(sizes, 8, 24)
    if kind == "positions":

        def run_on(model: Model, usual, at):
            return at

        stage.both(sizes, sequences, Plan(steps={"positions": run_on}))
        return Truth("framework", ("positions", "packing"), ("positions", "layers.0.q_rope"))
    grain = draw.choice([4, 8])

    def step(model: Model, usual, q, keys, values, visible, at):
        place = torch.arange(len(model.tokens))
        if kind == "none":
            seen = place <= at[:, None]
        else:
            bounds, begin = [], 0
            for stop in sorted(set(model.stop.tolist())):
                bounds.append(begin)
                begin += -(-(stop - bounds[-1]) // grain) * grain + grain  # padded length
            begins = torch.tensor([max([b for b in bounds if b <= int(t)], default=0) for t in at])
            seen = (place >= begins[:, None]) & (place <= at[:, None])
        return model.attention(q, keys, values, seen)

    stage.both(sizes, sequences, Plan(steps={place: step}))
    return Truth("framework", ("packing",), (place,))


def rank_without_tokens(stage: Stage, draw: Draw) -> Truth:
    """11: a rank with no token leaves out its collective; the run never ends."""
    sizes = draw.sizes()
    layer, ranks = draw.layer(sizes), draw.choice([2, 4])
    empty = draw.randrange(ranks)
    place = f"layers.{layer}." + draw.choice(["o_proj", "mlp_norm", "expert_out" if sizes.moe[layer] else "act"])
    sequences = draw.sequences(sizes)
    weights = weights_of(sizes, draw.randrange(1 << 30))
    Model(sizes, weights).record(stage.folder / ("B" if stage.faulty == "A" else "A"), sequences)
    for rank in range(ranks):
        writer = TraceWriter(stage.folder / stage.faulty / f"rank-{rank}", sequences, engine="planted", shape=sizes.shape, rank=rank)

        class Hangs(Exception):
            pass

        def hang(model, usual, **_):
            raise Hangs

        def left_out(name: str) -> None:
            raise Hangs

        try:
            if rank == empty:  # it went on to the end of its layer's work without a row
                for point in ("embed", f"layers.{layer}.attn_norm"):
                    writer.put(point, torch.zeros(0, sizes.hidden), torch.zeros(0, dtype=torch.int64))
            else:
                Model(sizes, weights, Plan(steps={place: hang})).run(Tracer(writer), sequences)
        except Hangs:
            pass
        finally:
            writer.close()
    return Truth("unfinished", ("no-token-rank",))


def unwritten_rows(stage: Stage, draw: Draw) -> Truth:
    """12: rows of an output buffer that nobody wrote are read."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    place = f"layers.{layer}." + draw.choice(["expert_out" if sizes.moe[layer] else "act", "mlp_out", "attn", "o_proj"])
    sequences = draw.sequences(sizes)
    rows = draw.sample(range(sum(map(len, sequences))), draw.randint(1, 4))
    junk = draw.choice([float("nan"), float("inf")])

    def step(model: Model, usual, **_):
        out = usual().clone()
        out[rows] = junk
        return out

    stage.both(sizes, sequences, Plan(steps={place: step}))
    return Truth("framework", ("unwritten",), (place,))


def extra_rounding(stage: Stage, draw: Draw) -> Truth:
    """13: one more rounding between SiLU and the product."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    place = f"layers.{layer}.{'expert_act' if sizes.moe[layer] else 'act'}"

    def step(model: Model, usual, gate, up):
        return (F.silu(gate.double()).to(BF16).float() * up.float()).to(model.sizes.dtype)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: step}))
    return Truth("framework", ("extra-rounding",), (place,))


def temperature(stage: Stage, draw: Draw) -> Truth:
    """15: a temperature on one side only."""
    sizes = draw.sizes()
    told = draw.random() < 0.5
    value = round(draw.choice([0.6, 0.7, 0.8, 0.9, 1.2, 1.5]) + draw.uniform(-0.04, 0.04), 3)
    plan = Plan(temperature=value, facts={} if told else {"temperature": 1.0})
    stage.both(sizes, draw.sequences(sizes), plan)
    return Truth("framework", ("temperature",), ("logprob_rows", "logprob"), details={"temperature": value})


def norm_cast(stage: Stage, draw: Draw) -> Truth:
    """16: RMSNorm rounds before it multiplies by the weight."""
    sizes = draw.sizes(dtype=BF16)
    place = draw.choice([f"layers.{draw.layer(sizes)}.{part}" for part in ("attn_norm", "mlp_norm", "q_norm", "k_norm")] + ["final_norm"])

    def step(model: Model, usual, x, w=None, **_):
        w = model.weight("model.norm.weight") if w is None else w
        r = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        out = (x.float() * r).to(BF16) * w
        return out.flatten(1)

    stage.both(sizes, draw.sequences(sizes), Plan(steps={place: step}))
    return Truth("framework", ("norm-cast",), (place,))


def vocabulary_padding(stage: Stage, draw: Draw) -> Truth:
    """17: padding rows of the vocabulary are counted."""
    sizes = draw.sizes(tied=False)
    more = draw.choice([1, 16, 31, 64])
    spread = draw.choice([0.0, 0.0, 0.5])
    seed = draw.randrange(1 << 30)

    def step(model: Model, usual, logits):
        extra = torch.randn(len(logits), more, generator=torch.Generator().manual_seed(seed)).double() * spread
        return torch.cat([logits.double(), extra], -1).log_softmax(-1)[:, : model.sizes.vocab].float()

    stage.both(sizes, draw.sequences(sizes), Plan(steps={"logprob_rows": step}))
    return Truth("framework", ("vocab-padding",), ("logprob_rows", "logprob"))


def rope_table(stage: Stage, draw: Draw) -> Truth:
    """18: rotary frequencies, angles or the table in bf16."""
    sizes = draw.sizes(head_dim=draw.choice([8, 16]), theta=draw.choice([10000.0, 1000000.0]))
    kind = draw.choice(["table", "frequencies", "angles"])
    layer = draw.layer(sizes)

    def step(model: Model, usual, x, positions, heads):
        size = model.sizes.head_dim
        inverse = model.sizes.theta ** -(torch.arange(0, size, 2).double() / size)
        if kind == "frequencies":
            inverse = inverse.to(BF16).double()
        angle = positions.double()[:, None] * inverse
        if kind == "angles":
            angle = angle.to(BF16).double()
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        if kind == "table":
            cos, sin = cos.to(BF16).float(), sin.to(BF16).float()
        a, b = x.float().view(len(x), heads, size).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(model.sizes.dtype).view(len(x), -1)

    places = [f"layers.{layer}.{part}" for part in ("q_rope", "k_rope")]
    stage.both(sizes, draw.sequences(sizes, 20, 60, count=2), Plan(steps=dict.fromkeys(places, step)))
    return Truth("framework", ("rope-table",), tuple(places))


def head_types(stage: Stage, draw: Draw) -> Truth:
    """19: an fp32 head whose (tied) weight one side casts."""
    sizes = draw.sizes(dtype=FP32, tied=draw.random() < 0.7)
    everything = draw.random() < 0.5

    def step(model: Model, usual, x, w):
        given = x.to(BF16) if everything else x
        return pieces(given, w.to(BF16), 1)[0]

    stage.both(sizes, draw.sequences(sizes), Plan(steps={"logits": step}))
    return Truth("framework", ("dtype",), ("logits",))


def stale_copies(stage: Stage, draw: Draw) -> Truth:
    """21: packed copies of the weights are not refreshed: what is held is new, what is computed with is old."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    weights = weights_of(sizes, draw.randrange(1 << 30))
    at = f"model.layers.{layer}."
    choices = [f"{at}self_attn.{name}_proj.weight" for name in "qkvo"]
    choices += [f"{at}mlp.gate_proj.weight", f"{at}mlp.down_proj.weight"] if not sizes.moe[layer] else [f"{at}mlp.gate.weight"]
    experts = sizes.moe[layer] and draw.random() < 0.6
    kind = draw.choice(["gate", "up", "down"])
    names = [f"{at}mlp.experts.{e}.{kind}_proj.weight" for e in range(sizes.experts)] if experts else [draw.choice(choices)]
    size = draw.choice([0.1, 0.2, 0.4])
    old = {
        name: (weights[name].float() * (1 + size * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3)))).to(sizes.dtype)
        for name in names
    }
    stage.both(sizes, draw.sequences(sizes), Plan(held=old), weights=weights)
    part = f"expert_{'out' if kind == 'down' else kind}" if experts else {"gate": "router_logits"}.get(names[0].split(".")[-2], names[0].split(".")[-2])
    part = {"down_proj": "mlp_out"}.get(part, part)
    return Truth("weights", ("stale-copy",), (f"layers.{layer}.{part}",), parameter=f"{at}mlp.experts." if experts else names[0])


def evaluation(stage: Stage, draw: Draw) -> Truth:
    """22: dropout left on, a key that did not match on load, a wrong type on load, a transposed or an old parameter."""
    sizes = draw.sizes()
    layer = draw.layer(sizes)
    kind = draw.choice(["dropout", "attention dropout", "missing", "dtype", "transposed", "old"])
    sequences = draw.sequences(sizes)
    seed = draw.randrange(1 << 30)
    if "dropout" in kind:
        rate = draw.choice([0.1, 0.2, 0.3])
        generator = torch.Generator().manual_seed(seed)
        if kind == "dropout":
            part = draw.choice(["embed", f"layers.{layer}.o_proj", f"layers.{layer}.mlp_out", f"layers.{layer}.attn_residual", f"layers.{layer}.mlp_residual"])

            def step(model: Model, usual, **inputs):
                branch = inputs["y"] if part.endswith("residual") else usual()
                kept = (torch.rand(branch.shape, generator=generator) >= rate).float() / (1 - rate)
                dropped = (branch.float() * kept).to(model.sizes.dtype)
                return inputs["x"] + dropped if part.endswith("residual") else dropped
        else:
            part = f"layers.{layer}.attn"

            def step(model: Model, usual, q, keys, values, visible, at):
                size, group = model.sizes.head_dim, torch.arange(model.sizes.heads) // (model.sizes.heads // model.sizes.kv)
                split = [tensor.double().view(len(tensor), -1, size) for tensor in (q, keys, values)]
                scores = torch.einsum("nqd,tqd->nqt", split[0], split[1][:, group]) * size**-0.5
                p = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
                p = p * (torch.rand(p.shape, generator=generator).double() >= rate) / (1 - rate)
                return torch.einsum("nqt,tqd->nqd", p, split[2][:, group]).float().to(model.sizes.dtype).flatten(1)

        stage.both(sizes, sequences, Plan(steps={part: step}, facts={"training": draw.random() < 0.5}))
        return Truth("framework", ("dropout",), (part,))
    if kind == "transposed":
        sizes = replace(sizes, hidden=sizes.heads * sizes.head_dim)
    weights = weights_of(sizes, seed)
    at = f"model.layers.{layer}."
    where = f"{at}mlp.experts.*." if sizes.moe[layer] else f"{at}mlp."
    name = draw.choice([f"{at}self_attn.{name}_proj.weight" for name in "qkvo"] + [f"{where}{name}_proj.weight" for name in ("gate", "up", "down")])
    if kind == "transposed":
        name = f"{at}self_attn.{draw.choice('qo')}_proj.weight"
    elif kind == "dtype":
        sizes = replace(sizes, dtype=FP32)
        weights = weights_of(sizes, seed)
    elif draw.random() < 0.3:
        name = f"{at}{draw.choice(['input_layernorm', 'post_attention_layernorm'])}.weight"
    names = [n for n in weights if n == name or ("*" in name and n.startswith(name.split("*")[0]) and n.endswith(name.split("*")[1]))]
    changed = dict(weights)
    noise = torch.Generator().manual_seed(seed + 1)
    for n in names:
        w = weights[n]
        if kind == "missing":
            fresh = torch.ones_like(w) if w.dim() == 1 else torch.randn(w.shape, generator=noise).to(w.dtype) * 0.02 if seed % 2 else torch.zeros_like(w)
            changed[n] = fresh
        elif kind == "dtype":
            changed[n] = w.to(BF16).to(w.dtype)
        elif kind == "transposed":
            changed[n] = w.t().contiguous()
        else:
            changed[n] = (w.float() + 0.05 * w.float().std() * torch.randn(w.shape, generator=noise)).to(w.dtype)
    stage.both(sizes, sequences, Plan(), weights=weights, wrong_weights=changed)
    causes = {"missing": "weights-missing", "dtype": "weights-dtype", "transposed": "weights-transposed", "old": "weights-stale"}
    return Truth("weights", (causes[kind],), parameter=name.split("*")[0] if "*" in name else name)


FAULTS: list[Callable[[Stage, Draw], Truth]] = [
    pieces_in_another_order, partial_sums_in_bf16, token_owner_against_expert_owner, ring_starts_at_the_owner, sequence_parallel, fused_add_norm, tie,
    router_softmax, padding_is_routed, packing, rank_without_tokens, unwritten_rows, extra_rounding, micro_batch, temperature, norm_cast, vocabulary_padding,
    rope_table, head_types, size_of_the_message, stale_copies, evaluation, *REPORTED,
]  # fmt: skip
"""In the order of the list of field reports: number 1 first."""


def plant(number: int, seed: int, folder: Path) -> Truth:
    """Two traces, ``A`` and ``B`` in ``folder``, with the fault ``number`` (from 1) at a place drawn by ``seed``; one that changes no byte is drawn again."""
    draw = Draw(1000 * number + seed)
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        stage = Stage(folder, draw)
        truth = replace(FAULTS[number - 1](stage, draw), side=stage.faulty)
        traces = open_trace(folder / "A"), open_trace(folder / "B")
        if not all(isinstance(trace, Trace) for trace in traces):
            return truth
        differing = [int((traces[0].digests(name) != traces[1].digests(name)).sum()) for name in traces[0].names]
        if next((rows for rows in differing if rows), 0) >= truth.least:
            return truth


def clean(seed: int, folder: Path) -> None:
    """Two traces of one model in other layouts, chunks and batches, recorded with other points."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = Draw(77000 + seed)
    sizes = draw.sizes()
    weights, sequences = weights_of(sizes, draw.randrange(1 << 30)), draw.sequences(sizes)
    for name in "AB":
        places = [
            (i, at, min(len(sequence), at + step))
            for i, sequence in enumerate(sequences)
            for step in [draw.randint(3, 12)]
            for at in range(0, len(sequence), step)
        ]
        passes: list[list[Any]] = [[]]
        for run in places:
            if passes[-1] and draw.random() < 0.5:
                passes.append([])
            passes[-1].append(run)
            if draw.random() < 0.3:
                passes[-1].append(draw.randint(1, 5))  # padding
        left_out = draw.sample(["q_norm", "attn_residual", "mlp_out", "expert_gate", "logprob_rows"], draw.randint(0, 2))
        skip = frozenset(f"layers.{layer}.{part}" for layer in range(sizes.layers) for part in left_out) | frozenset(left_out)
        tp = draw.choice([1, 2, 4])
        plan = Plan(tp=tp, skip=skip, facts={"layout": {"tp": tp}, "training": False})
        Model(sizes, weights, plan).record(folder / name, sequences, passes, keep=draw.random() < 0.5)
