"""A whole Qwen3-MoE through stock GPTModel under ``apply()``: the same fp32 log-probabilities in every layout."""

import contextlib
import functools
from types import SimpleNamespace

import moe_models as models
import moe_world as world
import pytest
import torch
from context_plants import ring_merge
from megatron.core import parallel_state
from moe_models import Row
from tiny_megatron import build, losses, running

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.collectives import all_gather
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.layers import context
from tio_megatron.layers.context import all_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks
from tio_megatron.testing.qwen3 import ragged

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
    Row(cp=2, ep=2),
    Row(cp=2, ep=2, way="allgather", k=8, dtype="bfloat16"),
]
FULL = [
    Row(tp=tp, ep=ep, etp=etp, pp=pp, way=way, k=k, dtype=dtype, grouped=grouped, inference=inference)
    for tp, ep, etp, pp, inference in (
        *((tp, ep, etp, 1, False) for tp, ep, etp in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 4, 1))),
        *((tp, ep, etp, 2, False) for tp, ep, etp in ((1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1))),
        *((tp, ep, etp, 1, True) for tp, ep, etp in ((2, 2, 1), (4, 1, 4), (4, 2, 2))),
    )
    for way in ("alltoall", "allgather")
    for k, dtype, grouped in ((2, "float32", True), (4, "bfloat16", False), (8, "float32", False))
]
FULL += [
    Row(tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, way=way, dtype=dtype)
    for tp, cp, ep, etp, pp in ((1, 2, 1, 1, 1), (1, 4, 1, 1, 1), (1, 4, 4, 1, 1), (2, 2, 2, 1, 1), (2, 2, 4, 1, 1), (2, 2, 2, 2, 1), (1, 2, 2, 1, 2))
    for way in ("alltoall", "allgather")
    for dtype in ("float32", "bfloat16")
]


def table():
    for row in ROWS:
        yield pytest.param(row, id=str(row))
    for row in FULL:
        yield pytest.param(row, id=str(row), marks=pytest.mark.full)


@pytest.mark.parametrize("row", table())
def test_every_layout_gives_the_log_probabilities_of_one_rank(row):
    kind = SimpleNamespace(dtype="bf16" if row.dtype == "bfloat16" else "fp32", k=row.k, etp=row.etp, ep=row.ep, way=row.way)
    plants = {name: world.PLANTS[name] for name in world.plants_for(kind)}
    if row.cp > 1:
        plants["ring_merge"] = lambda: world.replaced((context, "attention", ring_merge(row.cp)))
    results = run_ranks(row.world, models.scores, row, plants, timeout=300)
    expected = models.alone(row.k, row.dtype)
    assert_same_bytes(models.joined(results, "ours"), expected, str(row))
    for name in plants:
        assert first_mismatch(models.joined(results, name), expected) is not None, f"{row} does not notice {name}"


def gradient_of_embedding(rank, row, plant=contextlib.nullcontext):
    """(place, gradient of the embedding's output [s, b, H]) of this rank's part of 4 samples of 96 tokens; None off the first stage."""
    setup = row.setup()
    samples = torch.tensor(ragged((97,) * 4, seed=3))
    with running(setup), Checkpoint(setup.path) as checkpoint:
        model, found = build(setup, checkpoint), []
        if parallel_state.is_pipeline_first_stage():
            model.embedding.register_forward_hook(lambda module, args, out: out.register_hook(found.append) and None)
        mine = samples.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        with plant():
            losses(model, [mine], backward=True, weight=2.0**-9)
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank() if setup.layout.sp else 0
        if not found:
            return None
        if row.cp == 1:
            return place, {"dx": found[0]}
        # Slices of sequence parallelism joined, then those of context parallelism: the whole of these samples, on every rank.
        own = all_gather(found[0], parallel_state.get_tensor_model_parallel_group()) if setup.layout.sp else found[0]
        group = parallel_state.get_context_parallel_group()
        return (place[0], 0), {"dx": all_tokens(own.transpose(0, 1), Sequences(None, group.rank(), group.size()), group).transpose(0, 1)}


@functools.cache
def gradient_alone(k, dtype):
    return run_ranks(1, gradient_of_embedding, Row(k=k, dtype=dtype), timeout=120)[0][1]["dx"]


TRAINED = [row for row in [*ROWS, Row(tp=2, cp=2, ep=2), Row(tp=2, cp=2, ep=4, way="allgather"), Row(cp=2, pp=2, ep=2)] if not row.inference]


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row), marks=() if i in (1, 6, 8, 10) else pytest.mark.full) for i, row in enumerate(TRAINED)])
def test_every_layout_gives_the_gradient_of_the_embedding_of_one_rank(row):
    """Through every layer: attention, both products, router and dispatch send back the same bytes."""
    results = [result for result in run_ranks(row.world, gradient_of_embedding, row, timeout=200) if result is not None]
    assert_same_bytes(world.gather(results, "dx"), gradient_alone(row.k, row.dtype), str(row))


@pytest.mark.parametrize("name", ["experts_in_sequence", "shard_as_one_leaf"])
def test_the_gradient_of_the_embedding_notices(name):
    planted = run_ranks(1, gradient_of_embedding, Row(), world.PLANTS[name], timeout=120)[0][1]["dx"]
    assert first_mismatch(planted, gradient_alone(4, "float32")) is not None


@pytest.mark.parametrize("row", [Row(), Row(tp=2, ep=2, pp=2), pytest.param(Row(tp=2, cp=2, ep=2), marks=pytest.mark.full)], ids=str)
def test_scoring_sends_no_padding_to_an_expert(row):
    """Sequences of very different lengths in one batch: each layer routes exactly their tokens, on every pipeline stage."""

    def work(rank):
        setup = row.setup()
        with running(setup), Checkpoint(setup.path) as checkpoint:
            model = build(setup, checkpoint)
            routed = []
            for layer in model.decoder.layers:
                layer.mlp.router.register_forward_hook(lambda module, args, out: routed.append(int((out[1] >= 0).all(1).sum())))
            token_logprobs(model, models.SEQUENCES)
            return routed

    results = run_ranks(row.world, work, timeout=120)
    layers = sum(len(routed) for routed in results) // (row.tp * row.cp)
    assert sum(map(sum, results)) == layers * sum(map(len, models.SEQUENCES))
