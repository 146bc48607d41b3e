"""One side computes or keeps a point in another type: which side that is, and where nothing tells."""

from dataclasses import replace

import pytest
import torch
from faults import examine
from planted_model import Plan, weights_of
from planted_pair import planted
from planted_variants import norm_place
from planting import BF16, FP32, Draw, Stage

SEEDS = (1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_models_in_two_types_neither_is_wrong(seed, tmp_path):
    """The same checkpoint in bf16 and in fp32: only its dtype says which one was meant."""
    draw = Draw(560 + seed)
    sizes = draw.sizes(dtype=BF16)
    weights = weights_of(sizes, seed)
    wide = {name: weight.float() for name, weight in weights.items()}
    Stage(tmp_path, draw).both(sizes, draw.sequences(sizes), Plan(), weights=weights, wrong_weights=wide, wrong_sizes=replace(sizes, dtype=FP32))
    found = examine(tmp_path)
    assert (found.cause, found.point, found.side) == ("dtype", "layers.0.attn_norm", ""), found
    assert "the checkpoint's dtype decides" in found.side_reason, found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_side_of_another_type_is_the_one_that_changes_it(dtype, seed, tmp_path):
    def plan(draw, sizes):
        place = draw.choice([norm_place(draw, sizes), f"layers.{draw.layer(sizes)}.{draw.choice(['o_proj', 'v_proj', 'attn'])}"])

        def step(model, usual, **inputs):
            held, model.sizes = model.sizes, replace(model.sizes, dtype=FP32 if dtype == BF16 else BF16)
            try:
                return usual()
            finally:
                model.sizes = held

        return place, Plan(steps={place: step})

    found, place, side = planted(tmp_path, seed, plan, dtype=dtype)
    assert (found.cause, found.point, found.side) == ("dtype", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_in_bf16_are_the_side_that_departs(seed, tmp_path):
    found, place, side = planted(tmp_path, seed, lambda draw, sizes: ("logits", Plan(steps={"logits": lambda model, usual, **_: usual().to(BF16)})), dtype=BF16)
    assert (found.cause, found.point, found.side) == ("dtype", place, side), found


@pytest.mark.parametrize("seed", SEEDS)
def test_one_checkpoint_kept_in_two_16_bit_types_is_no_stale_one(seed, tmp_path):
    draw = Draw(760 + seed)
    sizes = draw.sizes(dtype=BF16)
    wide = weights_of(replace(sizes, dtype=FP32), seed)
    halves = {name: weight.to(torch.bfloat16) for name, weight in wide.items()}, {name: weight.to(torch.float16) for name, weight in wide.items()}
    sequences = draw.sequences(sizes)
    Stage(tmp_path / "types", draw).both(sizes, sequences, Plan(), weights=halves[0], wrong_weights=halves[1])
    found = examine(tmp_path / "types")
    assert (found.kind, found.cause) == ("weights", "weights-dtype") and "both rounded from the same values" in found.evidence[0], found
    # The control: the float16 one is a step of training further.
    noise = torch.Generator().manual_seed(seed + 100)  # not the weights' own
    moved = {name: (weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=noise)).to(torch.float16) for name, weight in wide.items()}
    Stage(tmp_path / "moved", draw).both(sizes, sequences, Plan(), weights=halves[0], wrong_weights=moved)
    found = examine(tmp_path / "moved")
    assert found.cause == "weights-stale", found
