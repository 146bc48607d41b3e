"""Variables of launch scripts: what a script says plainly is put in, all else is named and never taken for a value."""

import json

import pytest

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify import doctor
from tio_megatron.verify.doctor import examine, settings
from tio_megatron.verify.doctor.shell import Variables

SCRIPT = """
#!/usr/bin/env bash
set -xeuo pipefail
source ./cluster.env   # it's not read
INFER_BACKEND=${INFER_BACKEND:-vllm}
actor_tp=${ACTOR_TP:-4}; actor_ep=${ACTOR_EP:-${EP:-4}}
NNODES=${NNODES:-2}
layers='+actor_rollout_ref.actor.megatron.override_transformer_config'
if [ "$NNODES" = 2 ]; then
    stages=1
else
    stages=2
fi
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${actor_tp}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$actor_ep"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True
    ${layers}.calculate_per_token_loss=True
)
python3 -m verl.trainer.main_ppo model_engine=megatron "${ACTOR[@]}" \\
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.rollout.name=$INFER_BACKEND \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$actor_tp trainer.nnodes=${NNODES} MORE "$@"
"""


@pytest.fixture(autouse=True)
def configuration_alone(monkeypatch):
    """Versions, switches and symbols of this process say nothing about options, and its variables are not a script's."""
    for part in ("versions", "switches", "symbols"):
        monkeypatch.setattr(getattr(doctor, part), "check", lambda *_, **__: ())
    for name in ("ACTOR_TP", "ACTOR_EP", "EP", "NNODES", "INFER_BACKEND", "X", "CP"):
        monkeypatch.delenv(name, raising=False)


def said(tmp_path, more=""):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.replace("MORE", more))
    return examine(model="Qwen3-30B-A3B", trainer=str(script), rollout=str(script)).findings


def problems(findings):
    return [(one.level, one.what) for one in findings if one.level in ("bad", "unknown")]


@pytest.mark.parametrize(
    "text, known, unknown",
    [
        ("A='1 2' # it's\nB=3", {"A": ["1", "2"], "B": ["3"]}, ""),
        ("A=1\nA=2", {}, "A"),
        ("A=1\nA=1", {"A": ["1"]}, ""),
        ("A=1\nif x; then\nA=2\nfi\nB=4", {"B": ["4"]}, "A"),
        ("f() {\n local A=1\n}\nB=2", {"B": ["2"]}, "A"),
        ("A=$(nproc)\nB=$((3*4))\nC=`x`\nD=3", {"D": ["3"]}, "ABC"),
        ("read A; for B in 1 2; do C=1; done; D=1", {"D": ["1"]}, "ABC"),
        ("[ x ] && A=1 || A=2\nB=5", {"B": ["5"]}, "A"),
        ("A=1 command x\nB=2", {"B": ["2"]}, "A"),
        ("export A=7\nB=${A}8", {"A": ["7"], "B": ["78"]}, ""),
        ("A=${B-3}\nC=${E:-4}\nD=${E-4}", {"A": ["3"], "C": ["4"], "D": []}, ""),
        ("A=1\nunset A", {}, "A"),
        ("case $x in a) A=1;; b) A=2;; esac; B=1", {"B": ["1"]}, "A"),
        ("A=(1 2)\nA+=(3)\nB=2", {"B": ["2"]}, "A"),
        ("A=${B:-${C:-5}}", {"A": ["5"]}, "B"),
        ("A=$C/x\nC=1\nD=${B:+x}", {"A": ["$C/x"], "D": ["${B:+x}"]}, "BC"),
        ("A=${A:-$B}x", {"A": ["${A:-$B}x"]}, "B"),
    ],
)
def test_what_a_script_says_plainly(text, known, unknown):
    variables = Variables(text, {"E": ""})
    assert {name: variables.fill(f"${{{name}}}") for name in known} == known
    assert all(variables.fill(f"x=${name}") == [f"x=${name}"] for name in unknown)


def test_a_script_of_verl_with_variables(tmp_path, monkeypatch):
    found = said(tmp_path)
    assert problems(found) == []
    (note,) = [one.what for one in found if one.what.startswith("variables as")]
    assert "actor_tp = '4'" in note and "INFER_BACKEND = 'vllm'" in note and "not read: ./cluster.env" in note
    script = str(tmp_path / "run.sh")
    assert (str(settings.trainer(script).layout), str(settings.rollout(script).layout)) == ("TP 4 EP 4 ETP 1 SP DP 4", "TP 4")
    monkeypatch.setenv("EP", "2")
    assert str(settings.trainer(script).layout) == "TP 4 EP 2 ETP 1 SP DP 4", "the environment goes before a default, as in a shell"


@pytest.mark.parametrize(
    "more, named",
    [
        ("actor_rollout_ref.rollout.dtype=${X}", "dtype"),
        ("actor_rollout_ref.rollout.name=$X", "name"),
        ("actor_rollout_ref.rollout.quantization=$X", "quantization"),
        ("actor_rollout_ref.rollout.logprobs_mode=$X", "logprobs_mode"),
        ("actor_rollout_ref.rollout.max_model_len=${X}", "max_model_len"),
        ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=${X}", "virtual_pipeline_model_parallel_size"),
        ("actor_rollout_ref.model.lora_rank=${X}", "lora_rank"),
        ("actor_rollout_ref.model.hf_config_path=$X", "hf_config_path"),
        ("${layers}.moe_permute_fusion=$X", "moe_permute_fusion"),
        ("${layers}.moe_aux_loss_coeff=$X", "moe_aux_loss_coeff"),
        ("${layers}.layernorm_epsilon=$X", "layernorm_epsilon"),
        ("${layers}.params_dtype=$X", "params_dtype"),
        ("${layers}.attention_dropout=$X", "attention_dropout"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=$X", "block_size"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=$X", "kv_cache_dtype"),
    ],
)
def test_a_variable_is_no_value(tmp_path, more, named):
    ((level, what),) = problems(said(tmp_path, more))
    assert level == "unknown" and f"{named} = " in what and "is not judged: a variable that is not set here" in what


@pytest.mark.parametrize(
    "more", ["actor_rollout_ref.rollout.max_num_seqs=$X", "trainer.project_name=$X", "data.train_files=$X", "actor_rollout_ref.rollout.n=$X"]
)
def test_a_variable_that_moves_no_byte_is_let_be(tmp_path, more):
    assert problems(said(tmp_path, more)) == []


@pytest.mark.parametrize(
    "more, says",
    [
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$stages", "write its number, or have verl write all"),
        ("actor_rollout_ref.actor.megatron.sequence_parallel=$X", "write it out, or have verl write all"),
        ("actor_rollout_ref.actor.strategy=fsdp", "only megatron has layers here"),
        ("model_engine=dp", "only megatron has layers here"),
        ("+actor_rollout_ref." + "a." * 3000 + "b=1", "3002 names deep; a setting has at most 64"),
    ],
)
def test_without_it_there_is_no_layout(tmp_path, more, says):
    with pytest.raises(ValueError, match=says):
        said(tmp_path, more)


def test_string_variables_of_megatron_lm(tmp_path):
    script = tmp_path / "pretrain.sh"
    words = "--tensor-model-parallel-size ${TP}\n  --num-layers 48 --norm-epsilon $EPS"
    script.write_text(f'TP=2\nMODEL_ARGS="\n  {words}"\nEPS=1\ntorchrun --nproc-per-node 4 pretrain_gpt.py $MODEL_ARGS\n')
    trainer = settings.trainer(str(script))
    assert str(trainer.layout) == "TP 2 DP 2 allgather" and trainer.settings["num_layers"] == 48
    assert trainer.running.left == {"layernorm_epsilon": "$EPS"}, "it was not set when it was put in"


@pytest.mark.parametrize(
    "more, level, says",
    [
        ("++actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True", "bad", "optimizer_cpu_offload = True"),
        ("+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True", "bad", "use_precision_aware_optimizer = True"),
        ("actor_rollout_ref.actor.optim.optimizer=sgd", "bad", "optimizer = 'sgd'"),
        ("actor_rollout_ref.actor.optim.optimizer=adam actor_rollout_ref.actor.optim.lr=1e-6", None, ""),
        ("${layers}.calculate_per_token_loss=False", "bad", "calculate_per_token_loss = False"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.layernorm_epsilon=0.01", "bad", "ref: layernorm_epsilon = 0.01"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.moe_token_dispatcher_type=flex", "bad", "ref: moe_token_dispatcher_type = 'flex'"),
        ("+actor_rollout_ref.ref.megatron.override_transformer_config.layernorm_epsilon=1e-6", None, ""),
        ("+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=10240", None, ""),
    ],
)
def test_what_the_start_refuses_is_named_before_it(tmp_path, more, level, says):
    found = problems(said(tmp_path, more))
    assert [one for one, _ in found] == ([level] if level else []) and all(says in what for _, what in found), found


def test_the_advice_is_in_verls_words(tmp_path):
    (found,) = [one for one in said(tmp_path, "${layers}.apply_rope_fusion=True") if one.level == "bad"]
    assert found.works == "++actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False would work"


def test_values_of_the_models_own_config_json_pass(tmp_path):
    model = tmp_path / "Qwen3-30B-A3B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MOE))
    for value, level in (("1e-06", []), ("0.01", ["bad"])):
        said(tmp_path, f"+actor_rollout_ref.model.override_config.rms_norm_eps={value}")
        found = examine(model=str(model), trainer=str(tmp_path / "run.sh"), rollout=str(tmp_path / "run.sh")).findings
        assert [one for one, what in problems(found) if "override_config" in what] == level
