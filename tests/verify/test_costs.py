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
from tio_megatron.models import published, shape_from_hf
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import DENSE, MOE, write_tiny
from tio_megatron.verify import costs

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=256, experts=6, top_k=2, moe_ffn=32, architecture="Qwen3MoeForCausalLM")
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
    assert rows[1].per == "layer" and rows[1].ours == sent


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
    assert counts[1] - counts[0] == costs.operators(shape_from_hf(MOE), Layout())[0]


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
        assert row["ours"] <= 2 * row["stock"] or row["what"].startswith(("sums inside experts", "log-softmax")), row


def test_plan_refuses_and_names_what_is_near(tmp_path):
    out = tmp_path / "c.json"
    done = CliRunner().invoke(app, ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp8", "--rollout", "tp8", "--out", str(out)])
    assert done.exit_code == 1 and "would work: trainer TP 4" in done.output and not out.exists()
    done = CliRunner().invoke(app, ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp1", "--rollout", "tp1", "--tokens", "0"])
    assert done.exit_code == 2


WHOLE = [
    ("dense", Layout(tp=2, sp=True), "alltoall"),
    pytest.param("dense", Layout(tp=2), "alltoall", marks=pytest.mark.full),
    pytest.param("moe", Layout(tp=2, etp=2, sp=True), "alltoall", marks=pytest.mark.full),
    pytest.param("moe", Layout(tp=2, ep=2, etp=1, sp=True), "alltoall", marks=pytest.mark.full),
    pytest.param("moe", Layout(ep=2, etp=1, dp=2), "allgather", marks=pytest.mark.full),
    ("moe", Layout(tp=2, ep=2, etp=1, sp=True), "allgather"),
]


@pytest.mark.parametrize("kind, layout, dispatcher", WHOLE, ids=lambda value: str(value))
def test_bytes_of_a_layer_in_a_whole_run(kind, layout, dispatcher, tmp_path):
    """What a rank of stock megatron-core sends for sums in a layer's forward and backward pass: two runs that differ by one layer."""
    from tiny_megatron import Setup, ddp, losses, on_ranks

    from tio_megatron.collectives import reduce

    config, tokens = MOE if kind == "moe" else DENSE, 64
    fields = {"moe_token_dispatcher_type": dispatcher} if kind == "moe" else {}

    def work(model, setup):
        sums, run = [0], reduce._run

        def counted(*args, **named):
            with wire.count() as traffic:
                out = run(*args, **named)
            sums[0] += traffic.sent
            return out

        reduce._run = counted
        batch = torch.randint(0, 700, (2, tokens // 2 + 1), generator=torch.Generator().manual_seed(3))
        with wire.count() as everything:
            losses(ddp(model), [batch], backward=True)
        reduce._run = run
        return sums[0], everything.sent

    found = []
    for layers in (1, 2):
        path = write_tiny(tmp_path / str(layers), config | {"num_hidden_layers": layers})
        found.append(on_ranks(Setup(path, layout, contract=Contract.for_layouts(layout), fields=fields), work))
    shape = shape_from_hf(config)
    rows = [row for row in costs.training(Contract.for_layouts(layout), shape, layout, tokens, dispatcher) if row.per == "layer"]
    gather = (layout.tp - 1) * tokens * shape.hidden * 2 // layout.tp if layout.sp else 0
    cut = [row for row in rows if "over tensor-parallel ranks" in row.what]  # each counts the gather that belongs to it
    expected = sum(row.ours for row in rows) - gather * len(cut)
    for rank in range(len(found[0])):
        assert found[1][rank][0] - found[0][rank][0] == expected, (rank, rows)
        if kind == "dense":  # nothing else moves but the inputs that the backward pass gathers again, in stock too
            assert found[1][rank][1] - found[0][rank][1] == sum(row.ours for row in rows) + gather * len(cut) // 2


def test_totals_of_a_step():
    layout = Layout(tp=4, ep=8, etp=1, sp=True, pp=2, dp=8)
    shape, _ = published()["Qwen3-30B-A3B"]
    rows = costs.training(Contract.for_layouts(layout), shape, layout, 4096)
    found = costs.total(rows, shape, layout, 4096, 3)
    layer, end, step = (sum(row.extra for row in rows if row.per == per) for per in ("layer", "last stage", "step"))
    assert found.extra == 24 * 3 * layer + 3 * end + step and found.tokens == 3 * 4096 and found.extra_per_token * found.tokens == found.extra


LOADS = """
import os, sys
os.environ["TIO_CONTRACT"] = sys.argv[1]
if sys.argv[2] == "megatron":
    import tio_megatron.auto
    from tio_megatron.integrations.megatron.applied import state
    print(state.active().fingerprint())
else:
    import vllm.plugins
    vllm.plugins.load_general_plugins()
    from tio_megatron.integrations.vllm import plugin
    print(plugin.active().fingerprint())
"""


@pytest.mark.full
def test_the_written_file_is_loaded_by_both_sides(tmp_path):
    """By ``import tio_megatron.auto`` and by vLLM's own plug-in loader, each in a process of its own."""
    import subprocess
    import sys

    out = tmp_path / "contract.json"
    arguments = ["plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp4+ep8", "--rollout", "tp4+ep", "--out", str(out), "--json"]
    answer = json.loads(CliRunner().invoke(app, arguments).output)
    for side in ("megatron", "vllm"):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOADS, str(out), side], capture_output=True, text=True, timeout=180)
        assert done.returncode == 0 and done.stdout.split()[-1] == answer["fingerprint"] != Contract().fingerprint(), done.stderr
    assert answer["totals"]["trainer"]["extra"] > 0
