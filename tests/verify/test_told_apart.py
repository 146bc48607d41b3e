"""Causes that look alike from afar: each is named, or ``unknown`` with the reason, and never taken for its neighbour."""

import pytest
import torch
from faults import examine
from planted_model import Plan, weights_of
from planted_pair import planted
from planted_variants import attending, norm_step
from planting import BF16, FP32, Draw, Stage

SEEDS = (1, 2)


def two_weights(folder, seed, change, **more):
    """The same of weights: ``change(draw, weights, sizes) -> (name, other weights)``."""
    draw = Draw(450 + seed)
    sizes = draw.sizes(**more)
    weights = weights_of(sizes, seed)
    name, other = change(draw, weights, sizes)
    Stage(folder, draw).both(sizes, draw.sequences(sizes), Plan(), weights=weights, wrong_weights=weights | other)
    return examine(folder), name


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fused", ["gate and up interleaved", "gate and up, rows drawn", "q, k and v, rows drawn"])
def test_rows_of_a_fused_projection_that_changed_places(fused, seed, tmp_path):
    def change(draw, weights, sizes):
        layer = draw.layer(sizes)
        if fused.startswith("q"):
            names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        else:
            expert = f"experts.{draw.randrange(sizes.experts)}." if sizes.moe[layer] else ""
            names = [f"model.layers.{layer}.mlp.{expert}{part}_proj.weight" for part in ("gate", "up")]
        whole = torch.cat([weights[name] for name in names])
        half = len(whole) // 2
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        if fused.endswith("interleaved"):
            order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()
        return names[0], dict(zip(names, whole[order].split([len(weights[name]) for name in names]), strict=True))

    found, name = two_weights(tmp_path, seed, change, hidden=48, width=24)
    assert (found.kind, found.cause, found.side) == ("weights", "weights-rows", ""), found
    assert found.parameter.rsplit(".", 2)[0] == name.rsplit(".", 2)[0] and "rows of several parameters" in found.evidence[0], found


@pytest.mark.parametrize("seed", SEEDS)
def test_small_noise_on_a_norm_is_no_factor(seed, tmp_path):
    def change(draw, weights, sizes):
        name = f"model.layers.{draw.layer(sizes)}.self_attn.q_norm.weight"
        noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
        return name, {name: weights[name] * (1.002 + 0.008 * noise)}

    found, name = two_weights(tmp_path, seed, change, dtype=FP32)
    assert (found.cause, found.parameter) == ("weights-stale", name), found


@pytest.mark.parametrize("seed", SEEDS)
def test_one_element_by_a_last_bit_is_not_enough_to_tell(seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.mlp_norm"

        def norm(x, w, dtype):
            out = (x.float() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float() * w.float()).to(dtype)
            at = int(out[3].abs().argmax())
            out.view(torch.int16)[3, at] += 1
            return out

        return place, Plan(steps={place: norm_step(norm)})

    found, place, _ = planted(tmp_path, seed, plan, dtype=BF16)
    assert (found.kind, found.point, found.side) == ("unknown", place, "") and any("1 element differs" in said for said in found.evidence), found


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epsilon_below_rounding_is_no_order(seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.attn_norm"

        def norm(x, w, dtype):
            return (x.float() * (x.double().square().mean(-1, keepdim=True) + 1e-8).rsqrt().float() * w.float()).to(dtype)

        return place, Plan(steps={place: norm_step(norm)})

    found, place, side = planted(tmp_path, seed, plan, dtype=FP32)
    assert found.point == place and found.cause in ("", "norm-epsilon") and found.side in ("", side), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["soft cap", "to bf16", "to fp16", "heads backwards", "next group"])
def test_attention_done_otherwise(kind, seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.attn"

        def change(model, visible, at, scale, group):
            own = {"heads backwards": model.sizes.kv - 1 - group, "next group": (group + 1) % model.sizes.kv}.get(kind, group)

            def finish(p, dtype):
                if kind.startswith("to"):
                    return p.float().to(BF16 if kind == "to bf16" else torch.float16).double()
                return (6 * torch.tanh(p.clamp_min(1e-30).log() / 6)).softmax(-1) * (p > 0) if kind == "soft cap" else p

            return visible, scale, own, finish

        return place, Plan(steps={place: attending(change)})

    found, place, side = planted(tmp_path, seed, plan, dtype=FP32, heads=8, kv=4)
    cause = {"soft cap": "", "to bf16": "extra-rounding", "to fp16": "extra-rounding"}.get(kind, "head-groups")
    assert (found.cause, found.point, found.side) == (cause, place, side if cause else ""), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rotary_tables_in_fp8(narrow, seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.{draw.choice(['q_rope', 'k_rope'])}"

        def step(model, usual, x, positions, heads):
            size = model.sizes.head_dim
            angle = positions.double()[:, None] * model.sizes.theta ** -(torch.arange(0, size, 2).double() / size)
            cos, sin = (part.float().to(narrow).float()[:, None] for part in (angle.cos(), angle.sin()))
            a, b = x.float().view(len(x), heads, size).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(model.sizes.dtype).reshape(len(x), -1)

        return place, Plan(steps={place: step})

    found, place, side = planted(tmp_path, seed, plan)
    assert (found.cause, found.point, found.side) == ("rope-table", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_softmax_before_top_k_that_is_not_normalised_is_the_side_named(seed, tmp_path):
    """Against a softmax after top-k, which sums to 1: the usual function by other steps."""
    draw = Draw(480 + seed)
    sizes = draw.sizes(moe=True, top_k=3, experts=8)
    place = f"layers.{draw.layer(sizes)}.expert_probs"
    before = Plan(steps={place: lambda model, usual, logits, ids: logits.softmax(-1).gather(1, ids)})
    after = Plan(steps={place: lambda model, usual, logits, ids: logits.gather(1, ids).softmax(-1)})
    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 12, 30), before, after)
    found = examine(tmp_path)
    assert found.cause in ("router-softmax", "router-normalise") and (found.point, found.side) == (place, stage.faulty), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_residual_taken_behind_the_norm(dtype, seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.attn_residual"

        def step(model, usual, x, y):
            weight = model.weight(f"model.layers.{place.split('.')[1]}.input_layernorm.weight")
            return model.norm(x, weight) + y

        return place, Plan(steps={place: step})

    found, place, side = planted(tmp_path, seed, plan, dtype=dtype)
    assert (found.cause, found.point, found.side) == ("residual-terms", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("narrow", [BF16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_narrow_frequencies_beside_a_bf16_table_on_both_sides(narrow, seed, tmp_path):
    """As transformers has it in a bf16 model: its table is bf16 anyway, and every product is rounded."""

    def turning(frequencies):
        def step(model, usual, x, positions, heads):
            size = model.sizes.head_dim
            inverse = (model.sizes.theta ** -(torch.arange(0, size, 2).double() / size)).float().to(frequencies).float()
            angle = positions.float()[:, None] * inverse
            cos, sin = (part.to(BF16)[:, None] for part in (angle.cos(), angle.sin()))
            a, b = x.view(len(x), heads, size).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).reshape(len(x), -1)

        return step

    draw = Draw(500 + seed)
    sizes = draw.sizes(dtype=BF16)
    place = f"layers.{draw.layer(sizes)}.q_rope"
    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 24, 40), Plan(steps={place: turning(narrow)}), Plan(steps={place: turning(FP32)}))
    found = examine(tmp_path)
    assert (found.cause, found.point) == ("rope-table", place) and found.side in ("", stage.faulty), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rotary_table_that_nobody_knows_is_no_rounding(seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.k_rope"

        def step(model, usual, x, positions, heads):
            size = model.sizes.head_dim
            noise = 1 + 2e-4 * torch.randn(size // 2, generator=torch.Generator().manual_seed(seed))
            angle = positions.double()[:, None] * model.sizes.theta ** -(torch.arange(0, size, 2).double() / size) * noise
            cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = x.float().view(len(x), heads, size).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(BF16).reshape(len(x), -1)

        return place, Plan(steps={place: step})

    found, place, side = planted(tmp_path, seed, plan, dtype=BF16)
    assert found.point == place and found.cause != "order" and found.side in ("", side), found
    if found.cause == "extra-rounding":  # few elements moved: another cos would do
        assert "nothing is summed" in " ".join(found.evidence)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weight", ["behind", "before"])
def test_a_norm_with_every_step_in_bf16_is_no_order(weight, seed, tmp_path):
    """Against a side that rounds before the weight, as transformers does."""

    def narrow(x, w, dtype):
        r = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return w * (x * r) if weight == "behind" else (x * w) * r

    def cast(x, w, dtype):
        return w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)

    draw = Draw(520 + seed)
    sizes = draw.sizes(dtype=BF16)
    place = f"layers.{draw.layer(sizes)}.{draw.choice(['attn_norm', 'mlp_norm', 'q_norm'])}"
    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 12, 30), Plan(steps={place: norm_step(narrow)}), Plan(steps={place: norm_step(cast)}))
    found = examine(tmp_path)
    assert found.kind != "order" and found.cause in ("", "norm-cast") and found.point == place, found
    assert found.side in ("", stage.faulty), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("narrow", ["result", "logits"])
def test_probabilities_that_one_side_rounds_are_no_other_sum(narrow, seed, tmp_path):
    """Both sides add by descending probability, which several rules give."""

    def route(model, logits, ids, rounded):
        given = logits.to(BF16).float() if rounded and narrow == "logits" else logits
        p = given.softmax(-1)
        chosen = p.gather(1, ids)
        out = chosen / p.topk(ids.shape[1], -1).values.sum(-1, keepdim=True)
        return out.to(BF16).float() if rounded and narrow == "result" else out

    draw = Draw(540 + seed)
    sizes = draw.sizes(dtype=FP32, moe=True, top_k=4, experts=8)
    place = f"layers.{draw.layer(sizes)}.expert_probs"
    plans = [Plan(steps={place: lambda model, usual, logits, ids, on=on: route(model, logits, ids, on)}) for on in (True, False)]
    stage = Stage(tmp_path, draw)
    stage.both(sizes, draw.sequences(sizes, 12, 30), *plans)
    found = examine(tmp_path)
    assert (found.cause, found.point, found.side) in {(cause, place, stage.faulty) for cause in ("router-dtype", "extra-rounding")}, found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["shifted", "cut off", "permuted"])
def test_token_ids_that_look_up_other_rows(kind, seed, tmp_path):
    def plan(draw, sizes):
        by = draw.choice([-2, -1, 1, 3])
        order = torch.randperm(sizes.vocab, generator=torch.Generator().manual_seed(seed))

        def step(model, usual, at):
            own = model.tokens[at]
            ids = {"shifted": (own + by) % sizes.vocab, "cut off": torch.where(own > sizes.vocab // 2, 0, own), "permuted": order[own]}[kind]
            return model.weight("model.embed_tokens.weight")[ids]

        return "embed", Plan(steps={"embed": step})

    found, place, side = planted(tmp_path, seed, plan)
    assert (found.cause, found.point, found.side) == ("embedding-row", place, side), found
