"""What `tio plan` says the two ends of a model send, held against what leaves a rank: by the layers alone on 2 and 4 ranks, and in a run of megatron-core."""

import json

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.collectives import wire
from tio_megatron.contract import Contract, Layout, ModelShape
from tio_megatron.layers import vocab
from tio_megatron.models import shape_from_hf
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import DENSE, write_tiny
from tio_megatron.verify import costs, end_costs

SHAPE = ModelShape(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, vocab=1000, ffn=64, architecture="Qwen3ForCausalLM")
POSITIONS, BATCH = 64, 2


def _rows(shape, ranks):
    return -(-shape.vocab // (128 * ranks)) * 128


def _even(ranks, rows, positions=POSITIONS):
    """Ids ``[positions, BATCH]`` that every rank, and every slice of positions, holds equally often."""
    return (torch.arange(positions) % ranks * rows)[:, None].expand(-1, BATCH).contiguous()


def _planned(shape, layout, tokens):
    return {row.what.split(" over")[0]: row.ours for row in end_costs.training(Contract.for_layouts(layout), shape, layout, tokens)}


@pytest.mark.parametrize("ranks, sp", [(2, True), (4, True), (4, False)])
def test_bytes_of_the_ends_of_a_trainer(ranks, sp):
    layout, rows = Layout(tp=ranks, etp=ranks, sp=sp), _rows(SHAPE, ranks)
    order = Contract.for_layouts(layout).vocab_order(SHAPE.vocab)

    def work(rank):
        shard, group = vocab.VocabShard(order, rows, rank, ranks), dist.group.WORLD
        weight = torch.randn(rows, SHAPE.hidden).bfloat16().requires_grad_()
        ids = _even(ranks, rows)
        sent = {}
        with wire.count() as traffic:
            x = vocab.vocab_embedding(ids, weight, shard, group=group, sequence_parallel=sp)
            x.sum().backward()
        sent["embedding"] = traffic.sent
        logits = torch.randn(POSITIONS, BATCH, rows, requires_grad=True)
        with wire.count() as traffic:
            vocab.vocab_logprob(logits, ids, shard, group=group).sum().backward()
        sent["log-softmax"] = traffic.sent
        with wire.count() as traffic:
            vocab._input_grad(torch.randn(POSITIONS, BATCH, rows), weight.detach(), shard, group, sp, torch.bfloat16)
        sent["logits' input gradient"] = traffic.sent
        return sent

    found = run_ranks(ranks, work)
    assert {name: max(sent[name] for sent in found) for name in found[0]} == _planned(SHAPE, layout, POSITIONS * BATCH)


@pytest.mark.parametrize("sp", [True, pytest.param(False, marks=pytest.mark.full)])
def test_bytes_of_the_ends_in_a_whole_run(sp, tmp_path):
    """The whole of what stock megatron-core sends in its layers and ends, layers taken away: a model of 2 layers less twice what a layer adds."""
    from tiny_megatron import Setup, ddp, losses, on_ranks_each

    layout = Layout(tp=2, etp=2, sp=sp)
    shape = shape_from_hf(DENSE)
    ids = _even(2, _rows(shape, 2), 33).t().contiguous()

    def work(model, setup):
        with wire.count() as traffic:
            losses(ddp(model), [ids], backward=True)
        return traffic.sent

    paths = [write_tiny(tmp_path / str(layers), DENSE | {"num_hidden_layers": layers}) for layers in (1, 2)]
    (one, two), *_ = on_ranks_each([Setup(path, layout, contract=Contract.for_layouts(layout)) for path in paths], work)
    gathers = 2 * 64 * shape.hidden * 2 // 2 if sp else 0  # the head's input, forward and for its weight's gradient: the same in stock, so in no line
    assert one - (two - one) == sum(_planned(shape, layout, 64).values()) + gathers


def test_a_rollouts_ends_and_one_rank_alone():
    assert not [*end_costs.rollout(SHAPE, Layout.for_vllm(1), 8)] and not [*end_costs.training(Contract(), SHAPE, Layout(), 8)]
    embedding, logits = end_costs.rollout(SHAPE, Layout.for_vllm(4), 8)
    assert embedding.extra == 0 and logits.ours == 2 * logits.stock == 3 * 8 * 1024 // 4 * 4


def test_stages_and_tied_weights():
    """With pipeline stages a rank has one end; a tied weight's gradient crosses the pipeline."""
    tied = ModelShape(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, vocab=1000, ffn=64, tied=True, architecture="Qwen3ForCausalLM")
    (row,) = end_costs.training(Contract(), tied, Layout(pp=2), 64)
    assert (row.per, row.ours, row.stock) == ("step", 1000 * 64 * 8, 1000 * 64 * 4)
    for pp in (1, 2):
        layout = Layout(tp=2, etp=2, sp=True, pp=pp)
        rows = costs.training(Contract.for_layouts(layout), SHAPE, layout, 64)
        ends = {stage: sum(row.ours for row in rows if row.per == stage) for stage in ("first stage", "last stage")}
        assert 0 < ends["first stage"] < ends["last stage"]
        layer = sum(row.ours for row in rows if row.per == "layer")
        expected = 3 * (2 * layer + sum(ends.values()) if pp == 1 else layer + ends["last stage"])
        assert costs.total(rows, SHAPE, layout, 64, 3).ours == expected


def test_plan_prints_them():
    arguments = ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp4+ep8", "--rollout", "tp4+ep", "--json"]
    answer = json.loads(CliRunner().invoke(app, arguments).output)
    for side, wanted in (("trainer", 3), ("rollout", 2)):
        rows = next(rows for name, rows in answer["costs"].items() if name.startswith(side))
        assert sum(row["what"].startswith(("embedding", "logits", "log-softmax")) for row in rows) == wanted
