"""What is off by more than rounding is never called an order, and an old copy of the weights is named only where other weights explain every row."""

from dataclasses import replace

import pytest
import torch
from faults import examine
from planted_model import Model, Plan, pieces, weights_of
from planted_variants import attending, norm_place, norm_step
from planting import BF16, FP32, Draw, Stage

SEEDS = (1, 2)


def both(folder, seed, plan, *, dtype=None, tokens=(20, 40), count=4, sizes=None, draw=None, **more):
    """One pair with ``plan(draw, sizes) -> (place, Plan)`` on a side drawn by chance: (finding, place, that side, sizes)."""
    draw = draw or Draw(900 + seed)
    sizes = sizes or draw.sizes(dtype=dtype or draw.choice([BF16, FP32]), **more)
    stage = Stage(folder, draw)
    place, planted = plan(draw, sizes)
    stage.both(sizes, draw.sequences(sizes, *tokens, count=count), planted)
    return examine(folder), place, stage.faulty, sizes


def changed(place, function):
    """A step that changes what the usual one gives."""

    def step(model, usual, **_):
        out = usual()
        return function(out.float()).to(out.dtype)

    return Plan(steps={place: step})


def product_place(draw, sizes):
    return f"layers.{draw.layer(sizes)}.{draw.choice(['o_proj', 'q_proj', 'v_proj'])}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["bias", "soft cap", "one element", "clamp"])
def test_a_product_that_no_weights_explain_is_unknown(kind, seed, tmp_path):
    def plan(draw, sizes):
        place = "logits" if kind == "soft cap" else product_place(draw, sizes)
        noise = torch.Generator().manual_seed(seed)

        def function(out):
            size = out.square().mean().sqrt()
            if kind == "bias":
                return out + 0.3 * size * torch.randn(out.shape[-1], generator=noise)
            if kind == "soft cap":
                return 3 * size * torch.tanh(out / (3 * size))
            if kind == "clamp":
                return out.clamp(-1.2 * size, 1.2 * size)
            out = out.clone()
            out[1, int(out[1].abs().argmax())] *= 1.05
            return out

        return place, changed(place, function)

    found, place, _, _ = both(tmp_path, seed, plan)
    assert (found.kind, found.point, found.side) == ("unknown", place, ""), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["input", "weight"])
def test_operands_in_fp8_are_a_matter_of_types(what, seed, tmp_path):
    def plan(draw, sizes):
        place = product_place(draw, sizes)

        def step(model, usual, x, w, **_):
            def cast(t):
                return t.to(torch.float8_e4m3fn).to(t.dtype)

            return pieces(cast(x) if what == "input" else x, cast(w) if what == "weight" else w, 1)[0].to(sizes.dtype)

        return place, Plan(steps={place: step})

    found, place, side, _ = both(tmp_path, seed, plan)
    assert (found.kind, found.cause, found.point) == ("framework", "dtype", place) and found.side in ("", side), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slightly_old_copy_is_no_order(seed, tmp_path):
    draw = Draw(700 + seed)
    sizes = draw.sizes(dtype=BF16, hidden=48)
    name = f"model.layers.{draw.layer(sizes)}.self_attn.q_proj.weight"
    weights = weights_of(sizes, seed)
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 20, 40, count=4), Plan(held={name: (weights[name].float() * (1 + 0.02 * noise)).to(BF16)}), weights=weights)
    found = examine(tmp_path)
    assert (found.cause, found.parameter, found.side) == ("stale-copy", name, stage.faulty), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [0.5, 1.01, -1.0])
def test_a_factor_is_a_scale_of_no_side(factor, seed, tmp_path):
    def plan(draw, sizes):
        place = draw.choice([product_place(draw, sizes), f"layers.{draw.layer(sizes)}.attn_norm", "final_norm"])
        return place, changed(place, lambda out: out * factor)

    found, place, _, _ = both(tmp_path, seed, plan)
    assert (found.kind, found.cause, found.point, found.side) == ("framework", "scale", place, ""), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["shift", "wrap", "divided"])
def test_positions_are_solved_for(kind, seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.{draw.choice(['q_rope', 'k_rope'])}"
        by = draw.choice([2, 3, 5, 17])

        def step(model, usual, x, positions, heads):
            size = model.sizes.head_dim
            at = {"shift": positions + by, "wrap": positions % (by + 8), "divided": positions / (2 if by < 4 else 4)}[kind].double()
            angle = at[:, None] * model.sizes.theta ** -(torch.arange(0, size, 2).double() / size)
            cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = x.float().view(len(x), heads, size).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(model.sizes.dtype).reshape(len(x), -1)

        return place, Plan(steps={place: step})

    found, place, side, _ = both(tmp_path, seed, plan, tokens=(30, 44), count=2)
    assert (found.cause, found.point, found.side) == ("rope-theta" if kind == "divided" else "positions", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("eps", [0.013, 3e-4])
def test_an_epsilon_is_fitted(eps, seed, tmp_path):
    def plan(draw, sizes):
        place = norm_place(draw, sizes)

        def norm(x, w, dtype):
            return (x.float() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt().float() * w.float()).to(dtype)

        return place, Plan(steps={place: norm_step(norm)})

    found, place, side, _ = both(tmp_path, seed, plan, dtype=BF16 if eps > 1e-3 else FP32)
    assert (found.cause, found.point) == ("norm-epsilon", place) and found.side in ("", side), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scale_of_the_scores_is_fitted(seed, tmp_path):
    def plan(draw, sizes):
        place, factor = f"layers.{draw.layer(sizes)}.attn", draw.choice([0.7, 1.37, 0.2, 3.1])

        def change(model, visible, at, scale, group):
            return visible, scale * factor, group, lambda p, dtype: p

        return place, Plan(steps={place: attending(change)})

    found, place, side, _ = both(tmp_path, seed, plan)
    assert (found.cause, found.point, found.side) == ("attention-scale", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["viewed transpose", "elements of a norm"])
def test_the_same_numbers_in_another_order(kind, seed, tmp_path):
    draw = Draw(300 + seed)
    sizes = draw.sizes(hidden=48, heads=4, kv=2, head_dim=16)
    weights = weights_of(sizes, seed)
    layer = draw.layer(sizes)
    name = f"model.layers.{layer}.self_attn.{'o_proj' if kind == 'viewed transpose' else 'q_norm'}.weight"
    held = weights[name]
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))
    other = held.t().contiguous().view(held.shape) if held.dim() == 2 else held[order]
    assert not torch.equal(other, held)
    Stage(tmp_path, draw).both(sizes, draw.sequences(sizes), Plan(), weights=weights, wrong_weights=weights | {name: other})
    found = examine(tmp_path)
    assert (found.cause, found.parameter) == ("weights-transposed" if held.dim() == 2 else "weights-rows", name), found


@pytest.mark.parametrize("seed", SEEDS)
def test_narrow_partial_sums_in_a_wide_model_for_long_passes_alone(seed, tmp_path):
    draw = Draw(200 + seed)
    sizes = replace(draw.sizes(dtype=FP32), dtype=FP32)
    place = f"layers.{draw.layer(sizes)}.o_proj"
    short, long = draw.sequences(sizes, 5, 9, count=2), draw.sequences(sizes, 20, 30, count=2)

    def step(model: Model, usual, x, w, **_):
        if len(x) < 15:
            return usual()
        half = x.shape[1] // 2
        return ((x[:, :half].double() @ w[:, :half].double().t()).to(BF16) + (x[:, half:].double() @ w[:, half:].double().t()).to(BF16)).float()

    passes = [[(i, 0, len(sequence))] for i, sequence in enumerate([*short, *long])]
    Stage(tmp_path, draw).both(sizes, [*short, *long], Plan(steps={place: step}), passes=passes)
    found = examine(tmp_path)
    assert (found.kind, found.cause, found.point) == ("order", "order-by-size", place), found


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epsilon_in_a_fused_add_and_norm_is_fitted(seed, tmp_path):
    draw = Draw(100 + seed)
    sizes = draw.sizes(dtype=BF16)
    place, cast = f"layers.{draw.layer(sizes)}.mlp_norm", draw.random() < 0.5

    def fused(eps):
        def step(model, usual, x, w, stream, branch):
            total = stream.float() + branch.float()
            normed = total * (total.double().square().mean(-1, keepdim=True) + eps).rsqrt().float()
            return (normed.to(BF16) * w) if cast else (normed * w.float()).to(BF16)

        return Plan(steps={place: step})

    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes), fused(0.02), fused(1e-6))
    found = examine(tmp_path)
    assert (found.cause, found.point, found.side) == ("norm-epsilon", place, stage.faulty), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_result_kept_in_a_wide_type_after_fp8_is_a_rounding(seed, tmp_path):
    def plan(draw, sizes):
        place = product_place(draw, sizes)
        return place, changed(place, lambda out: out.to(torch.float8_e5m2).float())

    found, place, side, _ = both(tmp_path, seed, plan)
    assert found.cause in ("extra-rounding", "dtype") and (found.point, found.side) == (place, side), found
