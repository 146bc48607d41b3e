"""Recorders of stock engines: what they record is what the model computes, layouts agree, nothing is left behind, and switched off nothing changes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.contract import Layout
from tio_megatron.integrations.transformers_models.recorder import hf_hooks, load_hf, record_hf
from tio_megatron.testing import assert_same_bytes
from tio_megatron.testing.qwen3 import DENSE, MOE, ragged, write_tiny
from tio_megatron.traces import Tracer, TraceWriter, open_trace
from tio_megatron.verify.diagnosis import diagnose

SIZES = dict(num_hidden_layers=2, hidden_size=64, vocab_size=300, num_attention_heads=4, num_key_value_heads=2)
SEQUENCES = ragged((17, 1, 30), vocab=300)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {"moe": write_tiny(folder / "moe", MOE, **SIZES), "dense": write_tiny(folder / "dense", DENSE, **SIZES, tie_word_embeddings=True)}


def compared(a, b):
    return diagnose(open_trace(a), open_trace(b))


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_what_hf_computes_is_recorded(kind, checkpoints, tmp_path):
    model = load_hf(checkpoints[kind])
    record_hf(model, SEQUENCES, tmp_path / "a", keep=["all"], full_vocab=True)
    trace = open_trace(tmp_path / "a")
    assert [point.name for point in trace.graph] == trace.names, "every point of the model"  # (rows weighted before the down projection are Megatron's)
    with torch.no_grad():
        for start, sequence in ((0, SEQUENCES[0]), (18, SEQUENCES[2])):
            out = model(input_ids=torch.tensor([sequence]), output_hidden_states=True)
            rows = slice(start, start + len(sequence))
            assert_same_bytes(trace.values("logits")[rows], out.logits[0], "logits")
            assert_same_bytes(trace.values("embed")[rows], out.hidden_states[0][0], "embedding")
            assert_same_bytes(trace.values("layers.0.mlp_residual")[rows], out.hidden_states[1][0], "first layer")
            table = out.logits[0].float().log_softmax(-1)
            assert_same_bytes(trace.values("logprob_rows")[rows], table, "whole rows")
            chosen = table[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
            assert_same_bytes(trace.values("logprob")[rows][:-1], chosen, "log-probabilities")
    if kind == "moe":  # a token's experts add up to its row
        made = (trace.values("layers.1.expert_out").float() * trace.values("layers.1.expert_probs").float()[..., None]).sum(1)
        gap = (made - trace.values("layers.1.mlp_out").float()).abs().max()
        assert gap < 0.05 * made.abs().max()
        assert (trace.values("layers.1.expert_ids").diff(dim=1) > 0).all(), "ascending ids"


def test_hf_twice_is_equal_and_implementations_of_experts_are_laid_side_by_side(checkpoints, tmp_path):
    options = dict(keep=["all"], full_vocab=True)
    model = load_hf(checkpoints["moe"])
    for name in ("a", "b"):
        record_hf(model, SEQUENCES, tmp_path / name, **options)
    assert compared(tmp_path / "a", tmp_path / "b").kind == "equal"
    model.set_experts_implementation("eager")
    record_hf(model, SEQUENCES, tmp_path / "eager", **options)
    found = compared(tmp_path / "a", tmp_path / "eager")
    assert (found.kind, found.point) == ("order", "layers.0.mlp_out"), found  # the loop adds in bf16, expert by expert


def test_differences_that_people_have_are_named_on_hf(checkpoints, tmp_path):
    model = load_hf(checkpoints["moe"])
    record_hf(model, SEQUENCES, tmp_path / "a", keep=["all"], full_vocab=True)

    record_hf(model, SEQUENCES, tmp_path / "temperature", keep=["all"], temperature=0.7, full_vocab=True)
    found = compared(tmp_path / "a", tmp_path / "temperature")
    assert (found.kind, found.cause, found.details["temperature_b"]) == ("framework", "temperature", 0.7), found

    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3] *= 1.01
    record_hf(model, SEQUENCES, tmp_path / "weights", keep=["all"])
    found = compared(tmp_path / "a", tmp_path / "weights")
    assert (found.kind, found.point, found.parameter) == ("weights", "layers.1.expert_out", "model.layers.1.mlp.experts.3.down_proj.weight"), found

    model = load_hf(checkpoints["moe"])
    model.config._attn_implementation = "eager"
    record_hf(model, SEQUENCES, tmp_path / "eager", keep=["all"])
    found = compared(tmp_path / "a", tmp_path / "eager")
    assert (found.kind, found.cause, found.point) == ("framework", "extra-rounding", "layers.0.attn"), found

    record_hf(load_hf(checkpoints["moe"], "float32"), SEQUENCES, tmp_path / "fp32", keep=["all"])
    found = compared(tmp_path / "a", tmp_path / "fp32")
    assert (found.kind, found.cause, found.side) == ("framework", "dtype", ""), found
    assert "the checkpoint's dtype decides" in found.side_reason


def test_hooks_are_taken_off_and_nothing_changes(checkpoints, tmp_path):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    model = load_hf(checkpoints["moe"])
    rotary, ids = modeling_qwen3_moe.apply_rotary_pos_emb, torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with TraceWriter(tmp_path / "a", SEQUENCES, engine="hf", shape={"layers": 2, "moe": [True, True]}) as writer, hf_hooks(model, Tracer(writer)):
            assert_same_bytes(model(input_ids=ids).logits, before, "hooks on, no pass announced: nothing is recorded")
            assert not writer.points
        record_hf(model, SEQUENCES, tmp_path / "b")
        assert_same_bytes(model(input_ids=ids).logits, before, "hooks off")
    assert modeling_qwen3_moe.apply_rotary_pos_emb is rotary
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def on_megatron(checkpoint, folder, layout, ordered, **fields):
    from tiny_megatron import Setup, on_ranks

    from tio_megatron.checkpoint import Checkpoint

    def work(model, setup):
        from tio_megatron.integrations.megatron.recording.recorder import record_megatron

        with Checkpoint(setup.path) as held:
            record_megatron(model.eval(), held.config, SEQUENCES, folder, keep=["all"], full_vocab=True)

    on_ranks(Setup(checkpoint, layout, ordered=ordered, padding=float("nan") if ordered else 0.0, fields=fields), work)


@pytest.fixture(scope="module")
def on_one_rank(checkpoints, tmp_path_factory):
    """{(kind, ordered): trace of Megatron on one rank}"""
    import megatron.core.models.gpt  # noqa: F401  (imported before ranks are forked from here)

    folder = tmp_path_factory.mktemp("one")
    for kind in ("moe", "dense"):
        for ordered in (True, False):
            on_megatron(checkpoints[kind], folder / f"{kind} {ordered}", Layout(), ordered)
    return {(kind, ordered): folder / f"{kind} {ordered}" for kind in ("moe", "dense") for ordered in (True, False)}


GATHER = {"moe_token_dispatcher_type": "allgather"}
LAYOUTS = {
    "moe tp 2 sp, etp 2": ("moe", Layout(tp=2, sp=True), {}),
    "moe tp 2 sp, ep 2": ("moe", Layout(tp=2, sp=True, ep=2, etp=1), {}),
    "moe tp 2 without sp": ("moe", Layout(tp=2), {}),
    "moe tp 2 sp, ep 2, allgather": ("moe", Layout(tp=2, sp=True, ep=2, etp=1), GATHER),
    "moe ep 2 over dp 2, allgather": ("moe", Layout(ep=2, etp=1, dp=2), GATHER),
    "moe ep 2 over dp 2": ("moe", Layout(ep=2, etp=1, dp=2), {}),
    "moe pp 2": ("moe", Layout(pp=2), {}),
    "moe cp 2": ("moe", Layout(cp=2), {}),
    "moe cp 2, ep 2": ("moe", Layout(cp=2, ep=2, etp=1), {}),
    "dense tp 2 sp": ("dense", Layout(tp=2, sp=True), {}),
    "dense pp 2, tied": ("dense", Layout(pp=2), {}),
    "moe tp 2 sp, pp 2": ("moe", Layout(tp=2, sp=True, pp=2), {}),
    "moe tp 2 sp, cp 2, ep 4": ("moe", Layout(tp=2, sp=True, cp=2, ep=4, etp=1), {}),
    "moe tp 2 sp, cp 2, ep 2, etp 2": ("moe", Layout(tp=2, sp=True, cp=2, ep=2, etp=2), {}),
}
SLOW = ("moe tp 2 sp, pp 2", "moe tp 2 sp, cp 2, ep 4", "moe tp 2 sp, cp 2, ep 2, etp 2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in LAYOUTS])
def test_under_the_contract_every_layout_gives_one_trace(name, checkpoints, on_one_rank, tmp_path):
    """Unsharded digests under canonical names: tensor, sequence, expert, pipeline and context parallelism agree with one rank at every point."""
    kind, layout, fields = LAYOUTS[name]
    one = open_trace(on_one_rank[kind, True])
    assert len(one.names) == (47 if kind == "moe" else 39) and all((one.columns(point) > 0).all() for point in one.names if not point.startswith("logprob"))
    on_megatron(checkpoints[kind], tmp_path / "cut", layout, True, **fields)
    cut = open_trace(tmp_path / "cut")
    for point in one.names:
        assert (cut.columns(point) == one.columns(point)).all(), f"{point}: every column, once"
    found = compared(on_one_rank[kind, True], tmp_path / "cut")
    assert found.kind == "equal" and found.compared == len(one.names), found
    for point in ("layers.1.expert_out", "layers.1.expert_act") if kind == "moe" else ("layers.1.act",):
        assert_same_bytes(cut.values(point), one.values(point), point)


STOCK = {
    "tp 2 sp": ("moe", Layout(tp=2, sp=True), {}, "layers.0.o_proj", "2 pieces, sequential, bf16"),
    "dense tp 2 sp": ("dense", Layout(tp=2, sp=True), {}, "layers.0.o_proj", "2 pieces, sequential, bf16"),
    "ep 2, allgather": ("moe", Layout(ep=2, etp=1, dp=2), GATHER, "layers.0.mlp_out", "sums of 2 owners, bf16 partials"),
    "etp 2, allgather": ("moe", Layout(tp=2, sp=True, ep=1, etp=2), GATHER, "layers.0.o_proj", "2 pieces, sequential, bf16"),
    "pp 2": ("moe", Layout(pp=2), {}, "", ""),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_layouts_are_named(name, checkpoints, on_one_rank, tmp_path):
    kind, layout, fields, point, order = STOCK[name]
    on_megatron(checkpoints[kind], tmp_path / "cut", layout, False, **fields)
    found = compared(on_one_rank[kind, False], tmp_path / "cut")
    assert (found.kind, found.point) == (("order", point) if point else ("equal", "")), found
    assert found.details.get("order_b", "").startswith(order), found


def test_stock_megatron_against_transformers_and_the_contract(checkpoints, on_one_rank, tmp_path):
    record_hf(load_hf(checkpoints["moe"]), SEQUENCES, tmp_path / "hf", keep=["all"], full_vocab=True)
    found = compared(on_one_rank["moe", False], tmp_path / "hf")
    assert (found.kind, found.cause, found.point) == ("framework", "norm-cast", "layers.0.attn_norm"), found
    found = compared(on_one_rank["moe", False], on_one_rank["moe", True])
    assert (found.kind, found.cause, found.point) == ("framework", "rope-table", "layers.0.q_rope"), found


def test_stock_with_context_parallelism_is_refused_and_ranks_are_counted(checkpoints, tmp_path):
    from tio_megatron.integrations.megatron.recording.run import run_megatron

    with pytest.raises(ValueError, match="TP 1 CP 2 needs 2 ranks, there is 1: torchrun --nproc-per-node 2"):
        run_megatron(checkpoints["moe"], SEQUENCES, tmp_path / "a", layout="cp2", stock=True)


def on_vllm(checkpoint, folder, tokens, *more):
    quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = ["record", str(checkpoint), str(folder), "--tokens", str(tokens), "--keep", "all", "--engine", "vllm", "--full-vocab", *more]
    done = subprocess.run([sys.executable, "-m", "tio_megatron", *command], capture_output=True, text=True, timeout=300, env=os.environ | quiet)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_vllm_in_layouts_against_megatron_and_stock(checkpoints, on_one_rank, tmp_path):
    """Engines of their own processes, as the command starts them: under the contract vLLM and Megatron agree at every point, inside experts too."""
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("".join(json.dumps({"tokens": sequence}) + "\n" for sequence in SEQUENCES))
    one = on_vllm(checkpoints["moe"], tmp_path / "one", tokens)
    found = compared(on_one_rank["moe", True], one)
    assert found.kind == "equal" and found.compared == 47, found
    for layout in ("tp2", "tp2+ep"):
        found = compared(one, on_vllm(checkpoints["moe"], tmp_path / layout, tokens, "--layout", layout))
        assert found.kind == "equal" and found.compared == 47, found
    stock = on_vllm(checkpoints["moe"], tmp_path / "stock", tokens, "--stock")
    found = compared(one, stock)
    assert (found.kind, found.cause, found.point) == ("framework", "norm-cast", "layers.0.attn_norm"), found
    trace = open_trace(stock)
    act, out, ids = (trace.values(f"layers.0.{name}") for name in ("expert_act", "expert_out", "expert_ids"))
    down = torch.stack([trace.weight(f"model.layers.0.mlp.experts.{expert}.down_proj.weight") for expert in range(int(ids.max()) + 1)])
    made = torch.einsum("tki,tkhi->tkh", act.double(), down[ids.long()].double()).to(out.dtype)
    assert float((made == out).double().mean()) > 0.98, "rows follow from the activations that were recorded"
    found = compared(stock, on_vllm(checkpoints["moe"], tmp_path / "stock 2", tokens, "--stock", "--layout", "tp2"))
    assert (found.kind, found.point) == ("order", "layers.0.o_proj") and found.details["details_b"]["pieces"] == 2, found


def test_the_command_records_and_says_what_is_wrong(checkpoints, tmp_path):
    def tio(*arguments):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return done.exit_code, (done.stdout or done.stderr).strip()

    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("".join(json.dumps({"tokens": sequence}) + "\n" for sequence in SEQUENCES))
    for name in ("a", "b"):
        status, said = tio("record", checkpoints["moe"], tmp_path / name, "--tokens", tokens, "--keep", "attn", "--json")
        assert status == 0 and json.loads(said.splitlines()[-1])["tokens"] == 48, said
    assert open_trace(tmp_path / "a").kept == {"layers.0.attn", "layers.1.attn"}
    status, said = tio("diagnose", tmp_path / "a", tmp_path / "b")
    assert status == 0 and said.startswith("equal: 47 points") and "rows (tokens at points)" in said
    for arguments, says in (
        ((checkpoints["moe"], tmp_path / "a", "--tokens", tokens), "there is a trace already"),
        ((tmp_path / "nothing", tmp_path / "c", "--tokens", tokens), "no such folder"),
        ((checkpoints["moe"], tmp_path / "c", "--tokens", tmp_path / "none.jsonl"), "no such file"),
        ((checkpoints["moe"], tmp_path / "c", "--tokens", tokens, "--dtype", "fp7"), "bfloat16, float16 or float32"),
        ((checkpoints["moe"], tmp_path / "c", "--tokens", tokens, "--engine", "megatron", "--tp", 2), "TP 2 needs 2 ranks, there is 1: torchrun"),
        ((checkpoints["moe"], tmp_path / "c", "--tokens", tokens, "--engine", "vllm", "--temperature", 0.5), "without a temperature"),
    ):
        status, said = tio("record", *arguments)
        assert status == 2 and says in said.replace("\n", " "), (arguments, said)
