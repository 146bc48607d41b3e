"""A whole Qwen3-MoE through stock GPTModel under ``apply()``: the same fp32 log-probabilities in every layout."""

from types import SimpleNamespace

import moe_models as models
import moe_world as world
import pytest
from moe_models import Row
from tiny_megatron import build, running

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

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
    Row(tp=tp, ep=ep, etp=etp, pp=pp, way=way, k=k, dtype=dtype, grouped=grouped, inference=inference)
    for tp, ep, etp, pp, inference in (
        *((tp, ep, etp, 1, False) for tp, ep, etp in ((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 4, 1))),
        *((tp, ep, etp, 2, False) for tp, ep, etp in ((1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1))),
        *((tp, ep, etp, 1, True) for tp, ep, etp in ((2, 2, 1), (4, 1, 4), (4, 2, 2))),
    )
    for way in ("alltoall", "allgather")
    for k, dtype, grouped in ((2, "float32", True), (4, "bfloat16", False), (8, "float32", False))
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
    results = run_ranks(row.world, models.scores, row, plants, timeout=300)
    expected = models.alone(row.k, row.dtype)
    assert_same_bytes(models.joined(results, "ours"), expected, str(row))
    for name in plants:
        assert first_mismatch(models.joined(results, name), expected) is not None, f"{row} does not notice {name}"


@pytest.mark.parametrize("row", [Row(), Row(tp=2, ep=2, pp=2)], ids=str)
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
    layers = sum(len(routed) for routed in results) // row.tp
    assert sum(map(sum, results)) == layers * sum(map(len, models.SEQUENCES))
