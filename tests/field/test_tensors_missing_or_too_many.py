"""``tio record`` never runs a model some of whose weights are not in the checkpoint: it ends with status 2 and the names, whichever engine runs it."""

import json

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.testing.qwen3 import DENSE, MOE, write_tiny

SIZES = dict(num_hidden_layers=2, hidden_size=64, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
PROJECTION, EXPERT = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"

CASES = {
    "missing": (MOE, lambda held: held.pop(PROJECTION), [PROJECTION]),
    "renamed": (MOE, lambda held: held.update({"model.layers.1.self_attn.out.weight": held.pop(PROJECTION)}), [PROJECTION, "self_attn.out.weight"]),
    "too many": (MOE, lambda held: held.update({"model.layers.1.bias": held[PROJECTION].clone()}), ["model.layers.1.bias"]),
    "an expert missing": (MOE, lambda held: held.pop(EXPERT), [EXPERT]),
    "an expert too many": (MOE, lambda held: held.update({EXPERT.replace(".3.", ".4."): held[EXPERT].clone()}), [EXPERT.replace(".3.", ".4.")]),
    "an expert of another shape": (MOE, lambda held: held.update({EXPERT: held[EXPERT][:8].clone()}), [EXPERT]),
    "another architecture, missing": ("llama", lambda held: held.pop(PROJECTION), [PROJECTION]),
    "another architecture, another shape": ("llama", lambda held: held.update({PROJECTION: held[PROJECTION][:8].clone()}), [PROJECTION]),
}
"""Configuration, what is done to the tensors, names that must be in the message."""


def checkpoint(folder, kind):
    if kind != "llama":
        return write_tiny(folder / "model", kind, **SIZES)
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {name: SIZES[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")}
    LlamaForCausalLM(LlamaConfig(**fields, intermediate_size=96, max_position_embeddings=64)).save_pretrained(folder / "model")
    return folder / "model"


def record(model, folder, engine):
    (folder / "tokens.jsonl").write_text("[1, 2, 3]\n")
    words = ["record", str(model), str(folder / "trace"), "--engine", engine, "--tokens", str(folder / "tokens.jsonl"), "--json"]
    done = CliRunner().invoke(app, words)
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_named(case, tmp_path):
    kind, change, names = CASES[case]
    model = checkpoint(tmp_path, kind)
    file = model / "model.safetensors"
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(held)
    save_file(held, file, metadata={"format": "pt"})
    for engine in ("hf",) if kind == "llama" else ("hf", "megatron"):
        status, found = record(model, tmp_path, engine)
        assert status == 2 and all(name in found["error"] for name in names), (engine, found)
        assert not (tmp_path / "trace" / "trace.json").exists()


@pytest.mark.parametrize("kind", [DENSE, MOE, "llama"], ids=["dense", "experts", "another architecture"])
def test_a_whole_checkpoint_is_recorded(kind, tmp_path):
    assert record(checkpoint(tmp_path, kind), tmp_path, "hf") == (0, {"status": 0, "tokens": 3, "sequences": 1, "trace": str(tmp_path / "trace")})
