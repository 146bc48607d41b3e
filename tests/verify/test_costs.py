"""What `tio plan` says a contract costs, held against what really leaves a rank and what really runs."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.collectives import wire
from tio_megatron.contract import Contract, Layout, ModelShape
from tio_megatron.layers.experts import expert_mlp
from tio_megatron.layers.experts_replicated import experts_replicated
from tio_megatron.layers.linear import row_parallel
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny
from tio_megatron.verify import costs

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, experts=6, top_k=2, moe_ffn=32)
TOKENS = 4096


def _cost(rows, what):
    (found,) = [row.ours for row in rows if row.what.startswith(what)]
    return found


@pytest.mark.parametrize("sp", [False, True])
def test_bytes_of_a_row_parallel_product(sp):
    layout = Layout(tp=2, etp=2, sp=sp)

    def work(rank):
        x, w = torch.randn(TOKENS, 32).bfloat16(), torch.randn(SHAPE.hidden, 32).bfloat16()
        with wire.count() as traffic:
            row_parallel(x, w, leaves=1, group=dist.group.WORLD, sequence_parallel=sp)
        return traffic.sent

    sent = run_ranks(2, work)
    gather = TOKENS * SHAPE.hidden // 2 * 2 if sp else 0  # what the next product gathers: counted with the sum, as stock's is
    assert _cost(costs.training(Contract.for_layouts(layout), SHAPE, layout, TOKENS), "sum of attention output") == sent[0] + gather


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_bytes_of_a_rollouts_experts(expert_parallel):
    layout = Layout.for_vllm(2, expert_parallel)
    ids, probs = torch.stack([torch.randperm(6)[:2].sort().values for _ in range(TOKENS)]), torch.rand(TOKENS, 2)

    def work(rank):
        count, width = (3, 32) if expert_parallel else (6, 16)
        w13, w2 = torch.randn(count, 2 * width, 64).bfloat16(), torch.randn(count, 64, width).bfloat16()
        cut = (
            {"span": (3 * rank, 3 * rank + 3), "spans": [(0, 3), (3, 6)], "ep_group": dist.group.WORLD} if expert_parallel else {"etp_group": dist.group.WORLD}
        )
        with wire.count() as traffic:
            experts_replicated(torch.ones(TOKENS, 64).bfloat16(), ids, probs, w13, w2, experts=6, leaves=1, **cut)
        return traffic.sent

    sent = max(run_ranks(2, work))
    rows = costs.rollout(Contract.for_layouts(layout), SHAPE, layout, TOKENS)
    assert rows[-1].ours == sent


def test_bytes_inside_a_trainers_experts():
    layout = Layout(tp=2, etp=2, sp=True)

    def work(rank):
        rows = TOKENS * 2
        x, offsets = torch.ones(rows, 64).bfloat16(), torch.linspace(0, rows, 7).long()
        with wire.count() as traffic:
            expert_mlp(x, offsets, torch.randn(6, 32, 64).bfloat16(), torch.randn(6, 64, 16).bfloat16(), leaves=1, group=dist.group.WORLD)
        return traffic.sent

    assert _cost(costs.training(Contract.for_layouts(layout), SHAPE, layout, TOKENS), "sums inside experts") == run_ranks(2, work)[0]


def test_operators_of_a_layer(tmp_path):
    """Counted in a real forward pass of stock megatron-core under the contract: two models that differ by one layer."""
    from tiny_megatron import Setup, on_ranks

    counts = []
    for layers in (1, 2):
        path = write_tiny(tmp_path / str(layers), MOE | {"num_hidden_layers": layers})

        def work(model, setup):
            class Count(TorchDispatchMode):
                seen: list[str] = []

                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    if func.namespace == "tio":
                        self.seen.append(func.name())
                    return func(*args, **(kwargs or {}))

            tokens = torch.arange(8).view(1, 8)
            with torch.no_grad(), Count() as count:
                model(tokens, tokens, None)
            return len(count.seen)

        counts.append(on_ranks(Setup(path), work)[0])
    assert counts[1] - counts[0] == costs.operators(ModelShape.from_hf(MOE), Layout())[0]


def test_gradients_of_all_ranks_make_the_model():
    whole = sum(costs.parameters(SHAPE, Layout()))
    q, kv = 4 * 16 * 64, 2 * 2 * 16 * 64
    layer = 2 * q + kv + 2 * 16 + 2 * 64 + 6 * 64 + 3 * 6 * 32 * 64
    assert whole == 2 * layer + 2 * 256 * 64 + 64
    dense, experts = costs.parameters(SHAPE, Layout(ep=2, etp=1, dp=2))
    assert experts == 2 * 3 * 3 * 32 * 64 and dense + 2 * experts == whole


def test_plan_writes_a_contract_that_both_sides_load(tmp_path):
    arguments = ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp4+ep8", "--rollout", "tp4+ep", "--out", str(tmp_path / "c.json"), "--json"]
    done = CliRunner().invoke(app, arguments)
    answer = json.loads(done.output)
    written = Contract.from_json((tmp_path / "c.json").read_text())
    assert done.exit_code == 0 and written.fingerprint() == answer["fingerprint"] and written.cuts.attn_row == 4
    for row in answer["costs"]["trainer, 4096 tokens"]:
        assert row["ours"] <= 2 * row["stock"] or "inside experts" in row["what"], row


def test_plan_refuses_and_names_what_is_near(tmp_path):
    out = tmp_path / "c.json"
    done = CliRunner().invoke(app, ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp8", "--rollout", "tp8", "--out", str(out)])
    assert done.exit_code == 1 and "would work: trainer TP 4" in done.output and not out.exists()
    done = CliRunner().invoke(app, ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp1", "--rollout", "tp1", "--tokens", "0"])
    assert done.exit_code == 2
