"""Every known order of adding is tried and named, on planted traces of random sizes, layers and places. The planting is written apart from the search."""

import pytest
import torch
from faults import examine
from planted_model import Plan, pieces, weights_of
from planted_variants import CutStage
from planting import BF16, FP32, Draw

FP16 = torch.float16
STEPS = {"fp32": (FP32, FP32), "narrow partials, fp32 sums": (None, FP32), "narrow": (None, None)}
HOWS = ("sequential", "backwards", "pairwise", "halves", "ring", "chains")


def add(parts, how, running, start=0):
    """Partial sums of the type ``running``, joined."""
    parts = [part.to(running) for part in parts]
    if how == "pairwise":
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]
    if how == "halves":
        while len(parts) > 1:
            half = (len(parts) + 1) // 2
            parts = [parts[i] + parts[i + half] if i + half < len(parts) else parts[i] for i in range(half)]
        return parts[0]
    order = {"backwards": parts[::-1], "ring": parts[start:] + parts[:start]}.get(how, parts)
    total = order[0]
    for part in order[1:]:
        total = total + part
    return total


def chain(x, w):
    """Fused multiply-adds in ascending order, the running sum in fp32."""
    total = torch.zeros(len(x), len(w))
    for k in range(x.shape[1]):
        total = (total.double() + x[:, k, None].double() * w[:, k].double()).float()
    return total


def product_of(how, n, precision, narrow, start):
    partial, running = (narrow if kind is None else kind for kind in STEPS[precision])

    def product(x, w):
        cut = [chain(a, b) for a, b in zip(x.tensor_split(n, -1), w.tensor_split(n, -1), strict=True)] if how == "chains" else pieces(x, w, n)
        return add([part.to(partial) for part in cut], how, running, start)

    return product


def step_of(product):
    def step(model, usual, x, w=None, ids=None, layer=None, name=None, **_):
        dtype = model.sizes.dtype
        if ids is not None and name is not None:
            return model._each(layer, name, x, ids, lambda x, w: product(x, w).to(dtype))
        return product(x, w).to(dtype)

    return step


def planted(how, precision, seed, folder):
    """(side, name of the order that is right there)"""
    draw = Draw(9000 + 97 * HOWS.index(how) + 7 * list(STEPS).index(precision) + 1000 * seed)
    narrow = draw.choice([BF16, FP16])
    dtype = narrow if precision != "fp32" else FP32  # a narrow result hides most orders of wide sums
    n = draw.choice([2, 4, 8]) if how == "chains" else draw.choice([3, 4, 5, 8, 16]) if how == "ring" else draw.choice([3, 4, 6, 8, 12, 16])
    start = draw.randrange(1, n) if how == "ring" else 0
    sizes = draw.sizes(dtype=dtype, hidden=48 * draw.choice([1, 2]), width=48, heads=6, kv=3, head_dim=16)
    layer = draw.layer(sizes)
    inside = ["expert_gate", "expert_up", "expert_out"] if sizes.moe[layer] else ["gate_proj", "mlp_out"]
    place = f"layers.{layer}.{draw.choice(['q_proj', 'v_proj', 'o_proj', *inside])}"
    stage = CutStage(folder, draw)
    if how == "ring":
        n = 4 if 48 % n else n
        start %= n
        start = start or 1
    weights = weights_of(sizes, draw.randrange(1 << 30))
    wrong = Plan(steps={place: step_of(product_of(how, n, precision, narrow, start))})
    stage.both(sizes, draw.sequences(sizes, 12, 26), wrong, Plan(steps={place: step_of(lambda x, w: pieces(x, w, 1)[0])}), weights=weights)
    words = precision.replace("narrow", "bf16" if narrow == BF16 else "fp16")
    name = f"ring over {n} ranks from rank {start}, {words}" if how == "ring" else f"{n} pieces{', each a chain' if how == 'chains' else ''}, {{}}, {words}"
    return stage.faulty.lower(), name.format("sequential" if how == "chains" else how), place


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
@pytest.mark.parametrize("precision", STEPS)
@pytest.mark.parametrize("how", HOWS)
def test_an_order_is_named(how, precision, seed, tmp_path):
    side, name, place = planted(how, precision, seed, tmp_path)
    found = examine(tmp_path)
    assert (found.kind, found.point) == ("order", place), found
    same = [found.details[f"order_{side}"], *found.details[f"same_bytes_{side}"]]
    assert name in same or len(same) > 100, (name, same[:5], place)
    other = "b" if side == "a" else "a"
    assert "one exact sum, rounded once" in [found.details[f"order_{other}"], *found.details[f"same_bytes_{other}"]], found


COMBINES = {
    "experts by descending id": lambda terms, order: terms.flip(1),
    "experts by descending probability": lambda terms, order: terms.gather(1, order.flip(1)[..., None].expand_as(terms)),
    "experts by ascending probability": lambda terms, order: terms.gather(1, order[..., None].expand_as(terms)),
    "experts by ascending id": lambda terms, order: terms,
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
@pytest.mark.parametrize("running", ["fp32", "narrow"])
@pytest.mark.parametrize("name", COMBINES)
def test_an_order_of_experts_is_named(name, running, seed, tmp_path):
    draw = Draw(700 * (1 + list(COMBINES).index(name)) + 31 * (running == "narrow") + seed)
    narrow = draw.choice([BF16, FP16])
    sizes = draw.sizes(moe=True, dtype=narrow if running == "narrow" else draw.choice([BF16, FP32]), top_k=4, experts=draw.choice([8, 16]))
    place = f"layers.{draw.layer(sizes)}.mlp_out"

    def step(model, usual, out, probs, ids, places):
        terms = COMBINES[name](out.float() * probs[..., None], probs.argsort(dim=-1, stable=True))
        kind = narrow if running == "narrow" else FP32
        total = terms[:, 0].to(kind)
        for k in range(1, terms.shape[1]):
            total = (total.float() + terms[:, k]).to(kind)
        return total.to(model.sizes.dtype)

    def exact(model, usual, out, probs, ids, places):
        return (out.double() * probs.double()[..., None]).sum(1).float().to(model.sizes.dtype)

    stage = CutStage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 12, 26), Plan(steps={place: step}), Plan(steps={place: exact}))
    found = examine(tmp_path)
    if found.kind == "equal":
        pytest.skip("these terms show no order")
    assert (found.kind, found.point) == ("order", place), found
    side = stage.faulty.lower()
    words = f"{name}, products fp32, sums {running.replace('narrow', 'bf16' if narrow == BF16 else 'fp16')}"
    assert words in [found.details[f"order_{side}"], *found.details[f"same_bytes_{side}"]], (words, found)


def test_a_wrong_name_would_fail(tmp_path):
    """The control: the search does not give the bytes of an order that was not used."""
    side, _, _ = planted("backwards", "fp32", 0, tmp_path)
    found = examine(tmp_path)
    n = found.details[f"details_{side}"]["pieces"]
    assert f"{n} pieces, pairwise, fp32" not in [found.details[f"order_{side}"], *found.details[f"same_bytes_{side}"]]
