"""Points where nothing is summed: a rounding is named only where a rounding can have moved the elements."""

import pytest
import torch
from planted_model import Plan
from planted_pair import planted
from planted_variants import norm_step
from planting import BF16

SEEDS = (1, 2)


def turned(frequencies):
    """A rotary step with ``frequencies(theta, exponents [D / 2]) -> [D / 2]``."""

    def step(model, usual, x, positions, heads):
        size = model.sizes.head_dim
        angle = positions.double()[:, None] * frequencies(model.sizes.theta, torch.arange(0, size, 2).double() / size)
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x.float().view(len(x), heads, size).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(model.sizes.dtype).reshape(len(x), -1)

    return step


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["upper half slower", "theta a little off"])
def test_other_frequencies_are_no_rounding(kind, seed, tmp_path):
    def frequencies(theta, exponents):
        if kind == "theta a little off":
            return (1.01 * theta) ** -exponents
        return torch.where(exponents > 0.6, theta**-exponents / 4, theta**-exponents)

    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.{draw.choice(['q_rope', 'k_rope'])}"
        return place, Plan(steps={place: turned(frequencies)})

    found, place, _ = planted(tmp_path, seed, plan, dtype=BF16, theta=1e6)
    assert (found.kind, found.point, found.side) == ("unknown", place, ""), found


def activation(function):
    """``function(gate, up) -> [n, I]`` in fp32, at the activation of the last layer, which is dense."""

    def plan(draw, sizes):
        place = f"layers.{sizes.layers - 1}.act"
        return place, Plan(steps={place: lambda model, usual, gate, up: function(gate.float(), up.float()).to(BF16)})

    return plan


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["beta", "constant"])
def test_another_activation_below_rounding_is_no_rounding(kind, seed, tmp_path):
    def function(gate, up):
        silu = gate * torch.sigmoid(1.003 * gate) if kind == "beta" else torch.nn.functional.silu(gate) + 1e-4
        return silu * up

    found, place, _ = planted(tmp_path, seed, activation(function), dtype=BF16, moe=False)
    assert (found.kind, found.point, found.side) == ("unknown", place, ""), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rounding_between_steps_that_no_rule_lists_is_named_still(seed, tmp_path):
    """The control: both halves are multiplied and rounded first, then gated."""

    def function(gate, up):
        return (gate * up).to(BF16).float() * torch.sigmoid(gate)

    found, place, _ = planted(tmp_path, seed, activation(function), dtype=BF16, moe=False)
    assert (found.kind, found.cause, found.point) == ("framework", "extra-rounding", place), found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cast", [True, False])
def test_squares_rounded_before_the_mean_are_a_cast(cast, seed, tmp_path):
    def plan(draw, sizes):
        place = f"layers.{draw.layer(sizes)}.{draw.choice(['attn_norm', 'mlp_norm', 'q_norm'])}"

        def norm(x, w, dtype):
            normed = x.float() * torch.rsqrt((x * x).float().mean(-1, keepdim=True) + 1e-6)
            return w * normed.to(dtype) if cast else (normed * w.float()).to(dtype)

        return place, Plan(steps={place: norm_step(norm)})

    found, place, side = planted(tmp_path, seed, plan, dtype=BF16)
    assert (found.kind, found.cause, found.point, found.side) == ("framework", "norm-cast", place, side), found
