"""A configuration that computes another function is named, and an option that nobody judges never passes in silence."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify.doctor import coverage, defaults, examine, megatron_names, settings, vllm_names
from tio_megatron.verify.doctor.megatron_switches import SWITCHES

SIZES = """--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --ffn-hidden-size 6144
 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-epsilon 1e-6 --rotary-base 1000000 --untie-embeddings-and-output-weights"""
SOUND = """--qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16 --hidden-dropout 0 --attention-dropout 0
 --moe-token-dispatcher-type alltoall"""
CUT = """torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
 --sequence-parallel"""
VERL = [
    "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.nnodes=2",
]
MCORE = [
    f"actor_rollout_ref.actor.megatron.{size}"
    for size in ("tensor_model_parallel_size=4", "expert_model_parallel_size=4", "expert_tensor_parallel_size=1", "vanilla_mbridge=True")
]
OVER = "+actor_rollout_ref.actor.megatron.override_transformer_config."
MCORE += [f"{OVER}calculate_per_token_loss=True"]
SCRIPT = " ".join([CUT, SIZES, SOUND, "--lr 1e-5 --micro-batch-size 1 --seq-length 4096 --no-load-optim --save out --log-interval 1"])
VLLM = "--tensor-parallel-size 4 --generation-config vllm --max-model-len 2048 --gpu-memory-utilization 0.5 --port 8000 --no-enable-log-requests"


pytestmark = pytest.mark.usefixtures("configuration_alone")


def options_of(trainer=SCRIPT, rollout=VLLM, model="Qwen3-30B-A3B", **more):
    """(level, what) of what is said about options, without notes."""
    found = examine(model=model, trainer=trainer, rollout=rollout, **more).findings
    return [(one.level, one.what) for one in found if one.topic == "options" and one.level not in ("ok", "note")]


def test_a_whole_configuration_passes():
    assert not options_of() and not [one for one in options_of(plugged=False) if one[0] == "unknown"]


@pytest.mark.parametrize("plugged", [True, False])
@pytest.mark.parametrize(
    "more, name",
    [
        ("--moe-shared-expert-intermediate-size 64", "moe_shared_expert_intermediate_size"),
        ("--moe-layer-freq 2", "moe_layer_freq"),
        ("--moe-layer-freq ([0]*1+[1]*47)", "moe_layer_freq"),
        ("--quick-geglu", "quick_geglu"),
        ("--squared-relu", "squared_relu"),
        ("--softmax-scale 0.3", "softmax_scale"),
        ("--vocab-size 400", "vocab_size"),
        ("--vocab-size 151936 --tokenizer-type NullTokenizer", "vocab_size"),
        ("--tio-vocab-size 151669", "tio_vocab_size"),
        ("--padded-vocab-size 151808", "padded_vocab_size"),
        ("--window-size 16,0", "window_size"),
        ("--qk-l2-norm", "qk_l2_norm"),
        ("--rope-type yarn", "rope_type"),
        ("--reset-position-ids", "reset_position_ids"),
        ("--hybrid-override-pattern M*M*", "hybrid_override_pattern"),
    ],
)
def test_another_function_of_the_trainer(more, name, plugged):
    before = options_of(plugged=plugged)
    found = [one for one in options_of(f"{SCRIPT} {more}", plugged=plugged) if one not in before]
    assert len(found) == 1 and found[0][0] == "bad" and found[0][1].startswith(f"trainer: {name} "), found


@pytest.mark.parametrize(
    "more",
    ["--moe-layer-freq 1", "--moe-layer-freq [1]*48", "--vocab-size 151936", "--vocab-size 151935 --tokenizer-type NullTokenizer", "--window-size null"],
)
def test_the_same_function_in_other_words(more):
    assert not options_of(f"{SCRIPT} {more}")


@pytest.mark.parametrize(
    "more, level, said",
    [
        ("--load-format dummy", "unknown", "random weights"),
        ("--hf-overrides '{\"rope_theta\": 10000}'", "bad", "hf_overrides = {'rope_theta': 10000}"),
        ("--hf-overrides.rope_theta 10000", "bad", "hf_overrides = {'rope_theta': 10000}"),
        ("--hf-overrides my_function", "unknown", "not judged"),
        ("--override-generation-config '{\"temperature\":0.7}'", "bad", "with temperature 0.7"),
        ("--override-generation-config.temperature 0.7", "bad", "with temperature 0.7"),
        ("--override-generation-config '{\"bad_words\":[1]}'", "unknown", "sets bad_words: not judged"),
        ("--rope-scaling '{}'", "unknown", "vLLM 0.32.0 has no such option"),
        ("--nonsense", "unknown", "vLLM 0.32.0 has no such option"),
        ("--model /other", "bad", "another model"),
        ("--model $NOT_SET_HERE/x", "unknown", "a variable that is not set here"),
        ("--logits-processors a.b", "unknown", "not judged"),
        ("--revision abc", "unknown", "another revision"),
        ("--spec-model x", "bad", "speculative decoding"),
    ],
)
def test_another_function_of_the_rollout(more, level, said):
    found = options_of(rollout=f"{VLLM} {more}")
    assert len(found) == 1 and found[0][0] == level and said in found[0][1], found


@pytest.mark.parametrize(
    "more, level, said",
    [
        ("-pp 2", "bad", "pipeline_parallel_size = 2"),
        ("-pp=2", "bad", "pipeline_parallel_size = 2"),
        ("-dp 2", "bad", "data_parallel_size = 2"),
        ("-dcp 2", "bad", "decode_context_parallel_size = 2"),
        ("-q fp8", "bad", "quantization = 'fp8'"),
        ("-qfp8", "bad", "quantization = 'fp8'"),
        ("-O3", "unknown", "optimization_level = 3"),
        ("-O 3", "unknown", "optimization_level = 3"),
        ("-O.mode=3", "unknown", "optimization_level"),
        ("-cc.mode=3", "unknown", "compilation_config = 3"),
        ("-sc.model=x", "bad", "speculative_config.model = 'x'"),
        ("--kv-transfer-config.kv_role kv_both", "bad", "kv_transfer_config.kv_role = 'kv_both'"),
        ("-x 3", "unknown", "x is not judged: vLLM 0.32.0 has no such option"),
    ],
)
def test_vllms_short_options(more, level, said):
    found = options_of(rollout=f"{VLLM} {more}")
    assert len(found) == 1 and found[0][0] == level and said in found[0][1], found


def test_short_options_say_the_layout_and_other_programs_in_a_script_say_nothing(tmp_path):
    assert settings.rollout("-tp=4 -ep --generation-config vllm").layout == settings.rollout("tp4+ep").layout
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/bash\nset -ex\npip install -q x | head -n 3\npython3 -m vllm.entrypoints.openai.api_server -tp 4 --generation-config vllm -x\n")
    assert settings.rollout(str(script)).settings == {"tensor_parallel_size": 4, "generation_config": "vllm"}
    assert not options_of(rollout=str(script))


def test_vllms_short_names_are_the_installed_ones():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._actions
    theirs = {}
    for action in actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        theirs |= {option[1:]: long[0][2:].replace("-", "_") for option in action.option_strings if long and not option.startswith("--")}
    theirs.pop("h", None)
    assert theirs == {name: long for name, long in vllm_names.SHORT.items() if name != "O"}


def test_the_same_model_under_other_names(tmp_path):
    for name in ("Qwen/Qwen3-30B-A3B", "/somewhere/else/qwen3-30b-a3b"):
        assert not options_of(rollout=f"{VLLM} --model {name}")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    (tmp_path / "link").symlink_to(folder)
    for said in (folder, folder / "config.json"):
        assert not options_of("tp1", f"-tp 1 --generation-config vllm --model {tmp_path / 'link'}", str(said))


def test_options_that_are_none_of_megatron_lms():
    found = options_of(f"{SCRIPT} --bogus-option 3 --hiden-dropout 0 --fp16-lm-cross-entropy --use-checkpoint-args")
    assert [level for level, _ in found] == ["unknown"] * 4
    assert [re.split(" = | is ", what)[0].partition(": ")[2] for _, what in found] == [
        "fp16_lm_cross_entropy",
        "bogus_option",
        "hiden_dropout",
        "use_checkpoint_args",
    ]
    hint = [one.works for one in examine(model="Qwen3-30B-A3B", trainer=f"{SCRIPT} --hiden-dropout 0", rollout=VLLM).findings if "hiden" in one.what]
    assert hint == ["did you mean --hidden-dropout?"]


def test_every_argument_of_megatron_lm_is_judged_said_to_be_harmless_or_named():
    """Each of the deciding ones, written with a value that nobody expects, is heard of; else it says how it is computed, which the contract fixes."""
    silent = set()
    for name in sorted(set(megatron_names.DECIDING.split())):
        try:
            if not options_of(f"{SCRIPT} --{name.replace('_', '-')} 7"):
                silent.add(name)
        except ValueError:  # a size that does not fit the others
            continue
    how = "attention_backend calculate_per_token_loss group_query_attention sequence_parallel use_rotary_position_embeddings bf16 swiglu disable_bias_linear"
    how += " moe_router_dtype deterministic_mode qk_layernorm expert_model_parallel_size tensor_model_parallel_size untie_embeddings_and_output_weights"
    how += " transformer_impl moe_router_load_balancing_type"  # with a coefficient of 0
    how += " use_flash_attn"  # attention is ours
    how += " ffn_hidden_size"  # of layers without experts, of which there are none
    how += " main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype"  # of an optimizer that is refused by its switch
    assert silent <= {*how.split(), "pipeline_model_parallel_size", "expert_tensor_parallel_size"}, silent - {*how.split()}


def test_verls_model_and_overrides():
    words = " ".join([*VERL, *MCORE])
    assert not options_of(words, words)
    for more, level, said in (
        ("actor_rollout_ref.model.path=/other", "bad", "actor_rollout_ref.model.path = '/other'"),
        ("+actor_rollout_ref.model.override_config.rope_theta=10000", "bad", "override_config.rope_theta"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "bad", "use_fused_kernels=True"),
        ("actor_rollout_ref.actor.megatron.vanilla_mbridge=False", "bad", "vanilla_mbridge=False"),
        ("+actor_rollout_ref.model.mtp.enable=True", "bad", "mtp.enable=True"),
        ("actor_rollout_ref.model.hf_config_path=/other", "bad", "hf_config_path='/other'"),
        ("+actor_rollout_ref.actor.megatron.router_replay.mode=R2", "bad", "router_replay.mode='R2'"),
        ("actor_rollout_ref.rollout.top_p=0.9", "bad", "top_p = 0.9"),
        ("actor_rollout_ref.model.override_config={rms_norm_eps:0.01}", "bad", "override_config.rms_norm_eps=0.01"),
        ("actor_rollout_ref.model.override_config=[a]", "bad", "override_config=['a']"),
        ("+actor_rollout_ref.model.mtp={enable:True}", "bad", "mtp.enable=True"),
        ("actor_rollout_ref.actor.megatron.vanilla_mbridge=${VANILLA}", "unknown", "vanilla_mbridge = ${VANILLA} is not judged"),
        ("actor_rollout_ref.actor.megatron.vanilla_mbridge=${VANILLA:-False}", "bad", "vanilla_mbridge=False"),
        ("actor_rollout_ref.ref.megatron.vanilla_mbridge=False", "bad", "ref.megatron.vanilla_mbridge=False"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf-overrides={rms_norm_eps:0.01}", "bad", "hf"),
        ("actor_rollout_ref.model.lora_rank=8", "bad", "lora_rank = 8"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.bogus=1", "unknown", "bogus is not judged"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.params_dtype=float16", "unknown", "params_dtype = float16 is not judged"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.use_ascend_mc2=True", "bad", "use_ascend_mc2=True: its fused product"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.moe_shared_expert_intermediate_size=64", "bad", "no shared expert"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta=10000", "bad", "hf_overrides"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.bogus=1", "unknown", "bogus is not judged"),
    ):
        both = " ".join([*[one for one in VERL if not (more.startswith("actor_rollout_ref.model.path") and "model.path" in one)], *MCORE, more])
        found = options_of(both, both)
        assert len(found) == 1 and found[0][0] == level and said in found[0][1], (more, found)
    on = [f"+actor_rollout_ref.{name}.enable=True" for name in ("model.mtp", "actor.qat", "actor.megatron.qat")]
    found = options_of(" ".join([words, *on]), " ".join([words, *on]))
    assert [level for level, _ in found] == ["bad"] * 3, found
    for name, value in (("layernorm_epsilon", 0.001), ("moe_router_topk", 2), ("hidden_size", 32), ("num_layers", 2), ("rotary_base", 5)):
        both = f"{words} +actor_rollout_ref.actor.megatron.override_transformer_config.{name}={value}"
        found = options_of(both, both)
        assert len(found) == 1 and found[0][0] == "bad" and f"{name} = {value}, the model has" in found[0][1], (name, found)
    both = f"{words} +actor_rollout_ref.actor.megatron.override_transformer_config.layernorm_epsilon=1e-6"
    assert not options_of(both, both), "the model's own"
    both = f"{words} +actor_rollout_ref.rollout.pipeline_model_parallel_size=2"
    assert [level for level, what in options_of(both, both) if "pipeline_model_parallel_size = 2" in what] == ["bad"]
    other = f"{words} actor_rollout_ref.rollout.something_new=1"
    notes = [one.what for one in examine(model="Qwen3-30B-A3B", trainer=other, rollout=other).findings if "verl's own" in one.what]
    assert notes and "something_new" in notes[-1]


def test_mindspeeds_options_are_judged_by_its_table():
    works = "--use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm --use-distributed-optimizer"
    works += " --context-parallel-size 2 --context-parallel-algo kvallgather_cp_algo --optimizer-selection fused_torch_adamw"
    assert not options_of(f"{SCRIPT} {works}")
    for more, said in (
        ("--use-ascend-mc2", "use_ascend_mc2=True: its fused product"),
        ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", "context_parallel_algo='ulysses_cp_algo': it cuts"),
        ("--optimizer-selection fused_ema_adamw", "optimizer_selection='fused_ema_adamw'"),
        ("--pre-tockens 1024", "pre_tockens=1024: it is a sliding window"),
    ):
        ((level, what),) = options_of(f"{SCRIPT} {more}")
        assert level == "bad" and said in what, (more, what)
        assert {level for level, _ in options_of(f"{SCRIPT} {more}", plugged=False)} == {"unknown"}, "of a stock run nothing is promised"


def test_the_launch_script_that_is_shipped_is_judged(tmp_path):
    """It makes its model below its first argument, ``$out``: the folder's own name is compared, and it is said that no more was."""
    script = str(Path(__file__).parents[3] / "launch" / "qwen3_moe_verl.sh")
    for name, level in (("model", []), ("other", ["unknown"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(MOE))
        assert [found[0] for found in options_of(script, script, str(tmp_path / name))] == level
    notes = [one.what for one in examine(model=str(tmp_path / "model"), trainer=script, rollout=script).findings if "last part" in one.what]
    assert len(notes) == 1 and "'$out/model'" in notes[0]


def test_a_yaml_of_vllm_holds_mappings_of_its_own(tmp_path):
    (tmp_path / "v.yaml").write_text("tensor-parallel-size: 4\ngeneration-config: vllm\nhf-overrides: {rope_theta: 10000}\nspeculative-config: {model: x}\n")
    assert settings.rollout(str(tmp_path / "v.yaml")).settings["hf_overrides"] == {"rope_theta": 10000}
    assert [level for level, _ in options_of(rollout=str(tmp_path / "v.yaml"))] == ["bad", "bad"]


def test_a_config_json_of_two_minds(tmp_path):
    for name, value in (("model_type", "llama"), ("num_experts", 10**30)):
        (tmp_path / "config.json").write_text(json.dumps(MOE | {name: value}))
        with pytest.raises(ValueError, match=name):
            options_of("tp1", "tp1", str(tmp_path))


def test_names_of_vllm_are_the_installed_ones():
    from vllm.engine.arg_utils import AsyncEngineArgs

    theirs = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    ours = {*vllm_names.DECIDING, *vllm_names.NEUTRAL, *defaults.VLLM_ENGINE, *vllm_names.JUDGED}
    assert not theirs - ours, "an option of vLLM that would be said not to exist"
    assert not {*vllm_names.DECIDING} & vllm_names.NEUTRAL and not {*vllm_names.DECIDING} & {*defaults.VLLM_ENGINE}


def test_names_of_megatron_core_are_the_installed_ones():
    from megatron.core.transformer.transformer_config import TransformerConfig

    theirs = {field.name for field in dataclasses.fields(TransformerConfig)}
    known = coverage._ARGUMENTS | coverage.CORE_FIELDS | coverage._HEARD | coverage.rules()
    assert len(theirs - known) < 40, sorted(theirs - known)


NAMES = """
import argparse, json, sys, types
sys.modules.setdefault("six", types.SimpleNamespace(text_type=str, PY2=False, PY3=True))
from megatron.training.arguments import add_megatron_arguments
found, switches = set(), set()
for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve"))._actions:
    for option in action.option_strings:
        name = option.lstrip("-").replace("-", "_")
        if action.nargs == 0 and not name.startswith("no_"):
            switches.add(name)
        found.add(name[3:] if name.startswith("no_") and action.nargs == 0 else name)
print(json.dumps([sorted(found - {"h", "help"}), sorted(switches - {"h", "help"})]))
"""


def test_names_of_megatron_lm():
    sources = os.environ.get("MEGATRON_LM")
    if not sources:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM core_v0.16.1: its arguments' names are compared there only")
    environment = {**os.environ, "PYTHONPATH": sources, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    theirs, switches = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert switches == SWITCHES
    assert theirs - megatron_names.KNOWN == set() and len(megatron_names.KNOWN - theirs) < 12, sorted(megatron_names.KNOWN - theirs)


@pytest.mark.parametrize(
    "more, named",
    [
        ("--trust-remote-code", "trust_remote_code"),
        ("--enable-return-routed-experts", "enable_return_routed_experts"),
        ("--enable-prompt-embeds", "enable_prompt_embeds"),
        ("--max-model-len 40961", "max_model_len"),
        ("--max-model-len 40K", None),
        ("--max-model-len 41k", "max_model_len"),
        ("--max-model-len auto", None),
        ("--kv-cache-dtype float32", "kv_cache_dtype"),
        ("--kv-cache-dtype bfloat16", None),
        ("--kv-cache-dtype bfloat16 --dtype float32", "kv_cache_dtype"),
        ("--no-trust-remote-code", None),
    ],
)
def test_what_an_engines_start_refuses_is_bad(more, named):
    found = [what for level, what in options_of(rollout=f"{VLLM} {more}") if level == "bad" and what.startswith("rollout: ")]
    assert [re.match(r"rollout: (\w+)", what)[1] for what in found] == ([named] if named else []), found
