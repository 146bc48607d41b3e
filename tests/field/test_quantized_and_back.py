"""A parameter that went through a narrow type with scales and came back is named as that, with its grid; noise of the same size is another version."""

import itertools

import pytest
import torch
from planted_reports import GRIDS, there_and_back

from tio_megatron.traces import TraceWriter, open_trace
from tio_megatron.verify.diagnosis.parameters import explain_parameter

WORDS = {"one scale": "one {}scale", "a scale per row": "a {}scale for each row", "a scale per block of 128": "a {}scale for each block of 128"}


def explained(folder, sides):
    for label, weight in zip("AB", sides, strict=True):
        with TraceWriter(folder / label, [[1, 2]], engine="hand", shape={"layers": 1, "moe": [False]}, keep=True) as writer:
            writer.weight("model.layers.0.self_attn.q_proj.weight", weight)
    return explain_parameter(open_trace(folder / "A"), open_trace(folder / "B"), "model.layers.0.self_attn.q_proj.weight")


@pytest.fixture
def weight():
    """Rows and columns of very different sizes, so that every grid is another one."""
    draw = torch.Generator().manual_seed(5)
    return (torch.randn(300, 200, generator=draw) * torch.exp(2 * torch.randn(300, 1, generator=draw)) * torch.exp(torch.randn(200, generator=draw))) / 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("grid", GRIDS)
def test_the_grid_is_named(grid, kind, dtype, weight, tmp_path):
    weight = weight.to(dtype)
    for power, side in itertools.product((False, True), "AB"):
        back = there_and_back(weight, kind, grid, power)
        found = explained(tmp_path / f"{power}{side}", (back, weight) if side == "A" else (weight, back))
        words = WORDS[grid].format("power-of-two " if power else "")
        assert (found.cause, found.side) == ("weights-dtype", side), found
        assert f"rounded to {str(kind).removeprefix('torch.')} with {words}" in found.evidence[0] or power and kind == torch.float8_e5m2, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_noise_of_that_size_is_another_version(dtype, weight, tmp_path):
    """Each element is moved by up to the half step of fp8."""
    weight = weight.to(dtype)
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(7)) * 2 - 1
    found = explained(tmp_path, (weight, (weight.float() * (1 + noise / 16)).to(dtype)))
    assert found.cause == "weights-stale", found
