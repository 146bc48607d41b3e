"""A whole Qwen3-MoE through stock GPTModel under ``apply()``: the same fp32 log-probabilities in every layout."""

import functools
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract, Layout
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.megatron.apply import apply
from tio_megatron.integrations.megatron.from_hf import gpt_model, padded_vocab, transformer_config
from tio_megatron.integrations.megatron.scoring import token_logprobs
from tio_megatron.integrations.megatron.weights import load_weights
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks
from tio_megatron.testing.qwen3 import MOE, ragged, write_tiny

VOCAB = MOE["vocab_size"]
SEQUENCES = ragged((170, 1, 65, 97))


@dataclass(frozen=True)
class Row:
    """``tp``, ``ep``, ``etp``, ``pp``, dispatcher, top-k, dtype, grouped experts; sequence parallelism with tp unless ``inference``."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    way: str = "alltoall"
    k: int = 4
    dtype: str = "float32"
    grouped: bool = True
    inference: bool = False

    @property
    def world(self):
        return self.pp * max(self.tp, self.ep * self.etp)

    @property
    def layout(self):
        return Layout(tp=self.tp, ep=self.ep, etp=self.etp, pp=self.pp, sp=self.tp > 1 and not self.inference, dp=self.world // self.pp // self.tp)

    def __str__(self):
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "ep", "etp", "pp") if getattr(self, name) > 1]
        return "-".join([*sizes, self.way, f"k{self.k}", self.dtype, "grouped" if self.grouped else "sequential"] + ["inference"] * self.inference)


ROWS = [
    Row(tp=2, ep=2),
    Row(tp=2, ep=2, way="allgather", k=8, dtype="bfloat16", grouped=False),
    Row(tp=2, etp=2, way="allgather", grouped=False),
    Row(ep=2, way="allgather", k=8),
    Row(ep=4, dtype="bfloat16"),
    Row(tp=4, ep=4, k=8),
    Row(tp=4, ep=2, etp=2, way="allgather"),
    Row(tp=4, etp=4),
    Row(pp=2, ep=2, tp=2, way="allgather"),
    Row(pp=2, ep=2, k=2, dtype="bfloat16"),
    Row(tp=2, ep=2, etp=2, inference=True),
]
FULL = [
    Row(tp, ep, etp, pp, way, k, dtype, grouped, inference)
    for tp, ep, etp, pp, inference in (
        *((tp, ep, etp, 1, False) for tp, ep, etp in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 4, 1))),
        *((tp, ep, etp, 2, False) for tp, ep, etp in ((1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1))),
        *((tp, ep, etp, 1, True) for tp, ep, etp in ((2, 2, 1), (4, 1, 4), (4, 2, 2))),
    )
    for way in ("alltoall", "allgather")
    for k, dtype, grouped in ((2, "float32", True), (4, "bfloat16", False), (8, "float32", False))
]


@functools.cache
def folder(k, dtype):
    """A checkpoint with 16 experts of width 96. Kept until the interpreter ends."""
    held = TemporaryDirectory(prefix="tio-moe-")
    folder.held = [*getattr(folder, "held", []), held]
    return write_tiny(Path(held.name) / "model", MOE, num_experts=16, moe_intermediate_size=96, num_experts_per_tok=k, torch_dtype=dtype)


def start(row):
    parallel_state.initialize_model_parallel(
        row.tp, pipeline_model_parallel_size=row.pp, expert_model_parallel_size=row.ep, expert_tensor_parallel_size=row.etp
    )
    model_parallel_cuda_manual_seed(1)


def build(row, contract, **fields):
    with Checkpoint(folder(row.k, row.dtype)) as checkpoint:
        config = transformer_config(checkpoint.config, row.layout, moe_token_dispatcher_type=row.way, moe_grouped_gemm=row.grouped, **fields)
        model = gpt_model(checkpoint.config, config, vocab_size=padded_vocab(checkpoint.config, row.layout, contract))
        load_weights(model, checkpoint)
    return model


def scores(rank, row, plants):
    """{name: [logprobs of each of this rank's sequences]}, on the last stage. Data-parallel ranks have sequences of their own, of uneven lengths."""
    cpu_device.enable()
    start(row)
    mine = SEQUENCES[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    with apply(Contract(), vocab_size=VOCAB):
        model = build(row, Contract())
        found = {"ours": token_logprobs(model, mine)}
        for name, plant in plants.items():
            with plant():
                found[name] = token_logprobs(model, mine)
    place = parallel_state.get_data_parallel_rank()
    return place, {name: value.logprobs for name, value in found.items() if value is not None}


def joined(results, name):
    """All sequences' log-probabilities in their order, as one tensor; ranks that hold the same ones must agree."""
    by_place = {}
    for place, found in results:
        if name in found:
            for ours, theirs in zip(found[name], by_place.setdefault(place, found[name]), strict=True):
                assert_same_bytes(ours, theirs, f"ranks of data-parallel place {place}")
    count = len(by_place)
    return torch.cat([by_place[i % count][i // count] for i in range(len(SEQUENCES))])


@functools.cache
def alone(k, dtype):
    return joined(run_ranks(1, scores, Row(k=k, dtype=dtype), {}, timeout=200), "ours")


@pytest.mark.parametrize("row", [*(pytest.param(row, id=str(row)) for row in ROWS), *(pytest.param(row, id=str(row), marks=pytest.mark.full) for row in FULL)])
def test_every_layout_gives_the_log_probabilities_of_one_rank(world, row):
    kind = SimpleNamespace(dtype="bf16" if row.dtype == "bfloat16" else "fp32", k=row.k, etp=row.etp, ep=row.ep, way=row.way)
    plants = {name: world.PLANTS[name] for name in world.plants_for(kind)}
    results = run_ranks(row.world, scores, row, plants, timeout=300)
    expected = alone(row.k, row.dtype)
    assert_same_bytes(joined(results, "ours"), expected, str(row))
    for name in plants:
        assert first_mismatch(joined(results, name), expected) is not None, f"{row} does not notice {name}"
