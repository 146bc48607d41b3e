"""Experts' gradients have one rank's bytes where a block of ranks that share samples straddles the ranks over which experts are cut."""

import functools
import tempfile
from pathlib import Path

import pytest

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

HELD = tempfile.TemporaryDirectory(prefix="tio-any-sizes-")


@pytest.fixture(scope="module", autouse=True)
def model():
    """Written before ranks start: they must not each write it."""
    write_tiny(Path(HELD.name) / "model", MOE, num_hidden_layers=1, num_experts=12, torch_dtype="float32")


def train(rank, words):
    run = Training(Recipe(Path(HELD.name) / "model", steps=1, samples=6), parse(words), Contract())
    run.step()
    digest = run.sha256()
    run.close()
    return digest


@functools.cache
def digests(words):
    return set(run_ranks(parse(words).layout.ranks, train, words, timeout=600))


@pytest.mark.parametrize(
    "words",
    [
        "tp2+dp3+ep3",
        "cp2+dp3+ep3+etp1",
        pytest.param("dp6+ep3", marks=pytest.mark.full),
        pytest.param("cp3+dp2+ep2+etp1", marks=pytest.mark.full),
        pytest.param("tp2+dp3+ep3+allgather", marks=pytest.mark.full),
    ],
)
def test_one_step_has_one_ranks_bytes(words):
    assert digests(words) == digests("tp1")
