"""The configuration is judged as it will run: tables of defaults against the packages, and what a launch script forgets."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify.doctor import between, defaults, examine, model_of, options, running, settings

GIVEN = """torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
 --sequence-parallel --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128
 --ffn-hidden-size 6144 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --qk-layernorm --moe-token-dispatcher-type alltoall"""
FORGOTTEN = {
    "hidden_dropout": "--hidden-dropout 0",
    "attention_dropout": "--attention-dropout 0",
    "normalization": "--normalization RMSNorm",
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
    "position_embedding_type": "--position-embedding-type rope",
    "layernorm_epsilon": "--norm-epsilon 1e-6",
    "rotary_base": "--rotary-base 1000000",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "computes": "--bf16",
}
VLLM = "--tensor-parallel-size 4 --enable-expert-parallel --generation-config vllm"


def bad(trainer, rollout=VLLM, **more):
    """What forbids it, by the option's name."""
    found = examine(model="Qwen3-30B-A3B", trainer=trainer, rollout=rollout, **more)
    return {
        finding.what.split(":")[1 if ":" in finding.what[:10] else 0].split()[0 if ":" in finding.what[:10] else 1]: finding
        for finding in found.findings
        if finding.level == "bad"
    }


def test_what_a_launch_script_forgets_is_named_with_the_flag():
    found = bad(GIVEN)
    assert set(found) == set(FORGOTTEN)
    assert "0.1 (Megatron-LM core_v0.16.1's default)" in found["hidden_dropout"].what
    assert found["rotary_base"].works == "--rotary-base 1000000" and "float32 (megatron-lm without --bf16)" in found["computes"].what


@pytest.mark.parametrize("name", FORGOTTEN)
def test_each_flag_cures_its_own(name):
    assert set(bad(f"{GIVEN} {FORGOTTEN[name]}")) == set(FORGOTTEN) - {name}


def test_a_whole_script_passes_and_may_take_another_way():
    script = " ".join([GIVEN, *FORGOTTEN.values()])
    assert not bad(script)
    assert not bad(script.replace("--position-embedding-type rope", "--use-rotary-position-embeddings"))
    assert set(bad(script + " --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0.001")) == {"moe_router_load_balancing_type"}
    assert not bad(script + " --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0 0.001 --lr 1e-5")
    assert set(bad(script + " --ddp-average-in-collective")) == {"average_in_collective"}
    assert not bad(script + " --ddp-average-in-collective", training=False)


def test_words_say_that_nothing_was_looked_at():
    found = [finding for finding in examine(model="Qwen3-30B-A3B", trainer="tp2+ep2", rollout="tp4").findings if finding.topic == "options"]
    assert [finding.level for finding in found] == ["note", "note"] and "says nothing about options" in found[0].what


def test_vllms_defaults_are_judged(tmp_path):
    script = " ".join([GIVEN, *FORGOTTEN.values()])
    notes = [finding.what for finding in examine(model="Qwen3-30B-A3B", trainer=script, rollout="-tp 4").findings if finding.level == "note"]
    assert any("temperature = 0.6 of the model's generation_config.json (generation_config = 'auto' (vLLM 0.32.0's default))" in what for what in notes)
    assert any("top_k = 20, top_p = 0.95" in what for what in notes) and any("'raw_logprobs' (vLLM 0.32.0's default)" in what for what in notes)
    assert set(bad(script, "-tp 4 --no-disable-cascade-attn")) == {"cascade"}
    folder = tmp_path / "fp32"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE | {"dtype": "float32"}))
    found = [*options.rollout(running.rollout("vllm", {}), model_of(str(folder)).dtype)]
    assert [finding.level for finding in found] == ["bad"] and "dtype = 'auto' (vLLM 0.32.0's default): the checkpoint is float32" in found[0].what


VERL = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.nnodes=2",
]
MCORE = ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4"]
MCORE += ["actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1", "actor_rollout_ref.actor.megatron.vanilla_mbridge=True"]
MCORE += ["+actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss=True"]


def test_verls_command_line_and_defaults():
    words = " ".join(["python3 -m verl.trainer.main_ppo", *VERL, *MCORE])
    trainer, rollout = settings.trainer(words), settings.rollout(words)
    assert (str(trainer.layout), str(rollout.layout)) == ("TP 4 EP 4 ETP 1 SP DP 4", "TP 2")
    found = examine(model="Qwen3-30B-A3B", trainer=words, rollout=words).findings
    assert not [finding for finding in found if finding.level == "bad"]
    assert not any("calculate_log_probs" in finding.what for finding in found)
    off = words + " actor_rollout_ref.rollout.calculate_log_probs=False"
    assert any(
        "calculate_log_probs = False: verl does not keep" in finding.what for finding in examine(model="Qwen3-30B-A3B", trainer=words, rollout=off).findings
    )


@pytest.mark.parametrize(
    "more, name",
    [
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.hidden_dropout=0.1", "hidden_dropout"),
        ("++actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex", "moe_token_dispatcher_type"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True", "apply_rope_fusion"),
        ("actor_rollout_ref.rollout.name=sglang", "verl's"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "kv_cache_dtype"),
        ("actor_rollout_ref.rollout.dtype=half", "dtype"),
        ("actor_rollout_ref.rollout.quantization=fp8", "quantization"),
    ],
)
def test_overrides_of_verl_are_judged(more, name):
    words = " ".join([*VERL, *MCORE, more])
    assert name in bad(words, words)


def test_verl_validates_with_another_temperature_than_it_samples():
    words = " ".join([*VERL, *MCORE, "actor_rollout_ref.rollout.val_kwargs.temperature=0.3"])
    assert "temperature" not in settings.rollout(words).settings


def test_verls_fsdp_is_refused():
    with pytest.raises(ValueError, match="strategy is .fsdp, verl's default.*megatron"):
        settings.trainer(" ".join(VERL))
    with pytest.raises(ValueError, match="strategy is 'fsdp2'"):
        settings.trainer(" ".join([*VERL, "actor_rollout_ref.actor.strategy=fsdp2"]))
    assert str(settings.trainer(" ".join(["--config-name=ppo_megatron_trainer.yaml", *VERL])).layout) == "TP 1 DP 16 allgather".replace(" allgather", "")


def test_stock_packages_hear_what_moves_a_number():
    words = f"{GIVEN} --bf16 --hidden-dropout 0"
    found = {f.what.split(" = ")[0]: f for f in examine(model="Qwen3-30B-A3B", trainer=words, rollout=VLLM, plugged=False).findings if f.topic == "options"}
    assert found["trainer: attention_dropout"].level == "bad" and "trainer: hidden_dropout" not in found
    for name in ("trainer: transformer_impl", "trainer: attention_backend", "trainer: gradient_accumulation_fusion", "rollout: enable_prefix_caching"):
        assert found[name].level == "note" and "default)" in found[name].what
    assert "default)" not in found["trainer: tensor_model_parallel_size"].what and "trainer: tp_comm_overlap" not in found


def test_tables_are_those_of_the_installed_packages():
    from megatron.core.transformer.transformer_config import TransformerConfig

    core = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    assert {name: core[name] for name in defaults.TRANSFORMER_CONFIG} == defaults.TRANSFORMER_CONFIG
    from vllm.engine.arg_utils import EngineArgs

    vllm = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    assert {name: vllm[name] for name in defaults.VLLM_ENGINE} == defaults.VLLM_ENGINE


READ = """
import argparse, json, sys, types
for name in ("six",):  # what its tokenizers import; no argument depends on it
    sys.modules.setdefault(name, types.SimpleNamespace(text_type=str, PY2=False, PY3=True))
from megatron.training.arguments import add_megatron_arguments
found = {}
for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve"))._actions:
    found[action.dest] = action.default
print(json.dumps(found, default=lambda value: getattr(value, "name", repr(value))))
"""


def test_tables_are_those_of_megatron_lm():
    sources = os.environ.get("MEGATRON_LM")
    if not sources:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM core_v0.16.1: its arguments' defaults are compared there only")
    environment = {**os.environ, "PYTHONPATH": sources, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    back = {ours: theirs_name for theirs_name, ours in defaults.MEGATRON_NAMES.items() if theirs_name in theirs}
    found = {name: theirs.get(back.get(name, name), "absent") for name in defaults.MEGATRON_ARGUMENTS}
    found["layernorm_epsilon"] = theirs["norm_epsilon"] if "norm_epsilon" in theirs else theirs["layernorm_epsilon"]
    assert found == defaults.MEGATRON_ARGUMENTS


def test_tables_are_those_of_verl():
    sources = os.environ.get("VERL")
    if not sources:
        pytest.skip("VERL names no checkout of verl: its YAML is compared there only")
    folder = Path(sources) / "verl" / "trainer" / "config"
    rollout = yaml.safe_load((folder / "rollout" / "rollout.yaml").read_text())
    assert {name: rollout[name] for name in defaults.VERL_ROLLOUT} == defaults.VERL_ROLLOUT
    engine = yaml.safe_load((folder / "engine" / "megatron.yaml").read_text())
    flat = {**engine["override_transformer_config"], **engine, **yaml.safe_load((folder / "_generated_ppo_megatron_trainer.yaml").read_text())["trainer"]}
    shared = set(flat) & set(defaults.VERL_TRAINER)
    assert len(shared) >= 15 and {name: flat[name] for name in shared} == {name: defaults.VERL_TRAINER[name] for name in shared}


def test_what_nobody_can_know_is_not_accused():
    """Sizes from a checkpoint's arguments, and a trainer in words beside a rollout with a dtype."""
    run = running.trainer("megatron-lm", {"use_checkpoint_args": True, "num_layers": 3, "norm_epsilon": 1e-6, "qk_layernorm": True})
    assert not [*between.same_model(run, model_of("Qwen3-8B"))]
    assert not [*between.same_dtype(running.trainer("words", {}), running.rollout("vllm", {"dtype": "float32"}), model_of("Qwen3-8B"))]
