"""A configuration is judged as it will run: what another option does to a sound one, as tables of which every row is tried and all that fail are named."""

import json
import re

import pytest

from tio_megatron.testing.qwen3 import MOE
from tio_megatron.verify.doctor import between, examine, model_of, options, running, settings

SIZES = """--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --ffn-hidden-size 6144
 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 """
FORGOTTEN = {
    "hidden_dropout": "--hidden-dropout 0",
    "attention_dropout": "--attention-dropout 0",
    "normalization": "--normalization RMSNorm",
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
    "position_embedding_type": "--position-embedding-type rope",
    "layernorm_epsilon": "--norm-epsilon 1e-06",
    "rotary_base": "--rotary-base 1000000",
    "qk_layernorm": "--qk-layernorm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}
"""What a launch script forgets, and what the doctor tells to write."""
CUT = """torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
 --sequence-parallel --moe-token-dispatcher-type alltoall"""
GIVEN = f"{CUT} {SIZES} --bf16 --lr 1e-5 --micro-batch-size 1 --seq-length 4096 --no-load-optim --save out --log-interval 1"
SCRIPT = " ".join([GIVEN, *FORGOTTEN.values()])
VLLM = "--tensor-parallel-size 4 --generation-config vllm --max-model-len 2048 --gpu-memory-utilization 0.5 --port 8000 --no-enable-log-requests"
VERL = ["actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "actor_rollout_ref.rollout.name=vllm", "trainer.nnodes=2"]
PART = "actor_rollout_ref.actor.megatron"
OVER = f"+{PART}.override_transformer_config."
SOUND = ("tensor_model_parallel_size=4", "expert_model_parallel_size=4", "expert_tensor_parallel_size=1", "vanilla_mbridge=True")
MCORE = [*(f"{PART}.{one}" for one in SOUND), f"{OVER}calculate_per_token_loss=True"]

pytestmark = pytest.mark.usefixtures("configuration_alone")


def found(trainer=SCRIPT, rollout=VLLM, model="Qwen3-30B-A3B", **more):
    """What is bad or unknown about options."""
    findings = examine(model=model, trainer=trainer, rollout=rollout, **more).findings
    return [one for one in findings if one.topic == "options" and one.level in ("bad", "unknown")]


def wrong(rows, asked):
    """Of rows ``(more, level, said)`` those that do not come out as the only finding; an empty level: nothing is found."""
    lines = []
    for more, level, said in rows:
        got = asked(more)
        if not (not got if not level else len(got) == 1 and got[0].level == level and said in got[0].what):
            lines.append(f"{more}: wanted {level} {said!r}, got {[(one.level, one.what) for one in got]}")
    return lines


TRAINER = (
    ("--moe-shared-expert-intermediate-size 64", "bad", "trainer: moe_shared_expert_intermediate_size=64: the model has no shared expert"),
    ("--moe-layer-freq 2", "bad", "moe_layer_freq=2"),
    ("--moe-layer-freq ([0]*1+[1]*47)", "bad", "moe_layer_freq="),
    ("--quick-geglu", "bad", "quick_geglu=True"),
    ("--squared-relu", "bad", "squared_relu=True"),
    ("--softmax-scale 0.3", "bad", "softmax_scale=0.3"),
    ("--vocab-size 400", "bad", "vocab_size=400: the model has 151936"),
    ("--vocab-size 151936 --tokenizer-type NullTokenizer", "bad", "vocab_size (and the end of a text, which NullTokenizer adds)=151937"),
    ("--tio-vocab-size 151669", "bad", "tio_vocab_size=151669"),
    ("--padded-vocab-size 151808", "bad", "padded_vocab_size=151808: no room"),
    ("--window-size 16,0", "bad", "window_size="),
    ("--qk-l2-norm", "bad", "qk_l2_norm=True"),
    ("--rope-type yarn", "bad", "rope_type='yarn'"),
    ("--reset-position-ids", "bad", "reset_position_ids=True"),
    ("--hybrid-override-pattern M*M*", "bad", "hybrid_override_pattern="),
    ("--moe-layer-freq 1", "", ""),
    ("--moe-layer-freq [1]*48", "", ""),
    ("--vocab-size 151936", "", ""),
    ("--vocab-size 151935 --tokenizer-type NullTokenizer", "", ""),
    ("--window-size null", "", ""),
    ("--use-rotary-position-embeddings", "", ""),
    ("--bogus-option 3", "unknown", "bogus_option=3: not judged: Megatron-LM core_v0.16.1 has no such option"),
    ("--fp16-lm-cross-entropy", "unknown", "fp16_lm_cross_entropy=True: not judged"),
    ("--yaml-cfg x.yaml", "unknown", "yaml_cfg='x.yaml': what that file says"),
    ("--rotary-base $BASE", "unknown", "rotary_base='$BASE': not judged: a variable that is not set here"),
    ("--save $OUT", "", ""),
    ("--bogus $X", "unknown", "bogus='$X': not judged"),
    ("$MORE", "unknown", "'$MORE': not judged: it may hold options"),
)
"""Under the contract or not: more on the trainer's command line."""
COVERED = (
    ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01 0.001", "bad", "the value of aux_loss depends on the micro-batch"),
    ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0 0.001", "", ""),
    ("--ddp-average-in-collective", "bad", "average_in_collective=True"),
    ("--fp8-format e4m3", "bad", "fp8='e4m3': quantized"),
    ("--moe-expert-capacity-factor 1.0", "bad", "moe_expert_capacity_factor=1.0"),
    ("--use-precision-aware-optimizer", "bad", "use_precision_aware_optimizer=True"),
    ("--num-layers-per-virtual-pipeline-stage 2", "bad", "virtual pipeline stages"),
    ("--perform-rl-step", "bad", "perform_rl_step=True: megatron-core's inference engines"),
    ("--apply-layernorm-1p", "bad", "layernorm_zero_centered_gamma=True"),
    ("--use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm --use-distributed-optimizer", "", ""),
    ("--context-parallel-size 2 --context-parallel-algo kvallgather_cp_algo --optimizer-selection fused_torch_adamw", "", ""),
    ("--use-ascend-mc2", "bad", "use_ascend_mc2=True: its fused product"),
    ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", "bad", "context_parallel_algo='ulysses_cp_algo': it cuts"),
    ("--optimizer-selection fused_ema_adamw", "bad", "optimizer_selection='fused_ema_adamw'"),
    ("--pre-tockens 1024", "bad", "pre_tockens=1024: it is a sliding window"),
)
"""Under the contract."""
ROLLOUT = (
    ("--load-format dummy", "unknown", "random weights"),
    ("--hf-overrides '{\"rope_theta\": 10000}'", "bad", "hf_overrides={'rope_theta': 10000}"),
    ("--hf-overrides.rope_theta 10000", "bad", "hf_overrides={'rope_theta': 10000}"),
    ("--hf-overrides my_function", "unknown", "not judged"),
    ("--override-generation-config '{\"temperature\":0.7}'", "bad", "with temperature 0.7"),
    ("--override-generation-config.temperature 0.7", "bad", "with temperature 0.7"),
    ("--override-generation-config '{\"bad_words\":[1]}'", "unknown", "sets bad_words: not judged"),
    ("--rope-scaling '{}'", "unknown", "vLLM 0.32.0 has no such option"),
    ("--nonsense", "unknown", "vLLM 0.32.0 has no such option"),
    ("--model /other", "bad", "another model"),
    ("--model $NOT_SET_HERE/x", "unknown", "a variable that is not set here"),
    ("--model Qwen/Qwen3-30B-A3B", "", ""),
    ("--model /somewhere/else/qwen3-30b-a3b", "", ""),
    ("--logits-processors a.b", "unknown", "logits are changed"),
    ("--revision abc", "unknown", "another revision"),
    ("--spec-model x", "bad", "speculative decoding"),
    ("--config x.yaml", "unknown", "config='x.yaml': the options in that file"),
    ("--no-disable-cascade-attn", "bad", "cascade attention merges"),
    ("-pp 2", "bad", "pipeline_parallel_size=2"),
    ("-pp=2", "bad", "pipeline_parallel_size=2"),
    ("-dp 2", "bad", "data_parallel_size=2"),
    ("-dcp 2", "bad", "decode_context_parallel_size=2"),
    ("-q fp8", "bad", "quantization='fp8'"),
    ("-qfp8", "bad", "quantization='fp8'"),
    ("-O3", "unknown", "optimization_level=3"),
    ("-O 3", "unknown", "optimization_level=3"),
    ("-O.mode=3", "unknown", "optimization_level=3"),
    ("-cc.mode=3", "unknown", "compilation_config=3"),
    ("-sc.model=x", "bad", "speculative_config={'model': 'x'}"),
    ("--kv-transfer-config.kv_role kv_both", "bad", "kv_transfer_config={'kv_role': 'kv_both'}"),
    ("-x 3", "unknown", "x=3: not judged: vLLM 0.32.0 has no such option"),
    ("--trust-remote-code", "bad", "trust_remote_code=True"),
    ("--enable-return-routed-experts", "bad", "enable_return_routed_experts=True"),
    ("--enable-prompt-embeds", "bad", "enable_prompt_embeds=True"),
    ("--max-model-len 40961", "bad", "max_model_len=40961: the model has 40960 positions"),
    ("--max-model-len 41k", "bad", "max_model_len=41000"),
    ("--max-model-len 40K", "", ""),
    ("--max-model-len auto", "", ""),
    ("--kv-cache-dtype float32", "bad", "kv_cache_dtype='float32'"),
    ("--kv-cache-dtype bfloat16", "", ""),
    ("--no-trust-remote-code", "", ""),
    ("--block-size 16", "bad", "block_size=16: a page must hold whole blocks"),
    ("--block-size 128 --quantization none", "", ""),
    ("--served-model-name $NAME --max-num-seqs $MANY", "", ""),
    ("--dtype $TYPE", "unknown", "dtype='$TYPE': not judged"),
)
VERLS = (
    ("actor_rollout_ref.model.path=/other", "bad", "actor_rollout_ref.model.path='/other'"),
    ("+actor_rollout_ref.model.override_config.rope_theta=10000", "bad", "override_config.rope_theta"),
    ("actor_rollout_ref.model.use_fused_kernels=True", "bad", "use_fused_kernels=True"),
    (f"{PART}.vanilla_mbridge=False", "bad", "vanilla_mbridge=False"),
    ("+actor_rollout_ref.model.mtp.enable=True", "bad", "mtp.enable=True"),
    ("+actor_rollout_ref.model.mtp={enable:True}", "bad", "mtp.enable=True"),
    ("actor_rollout_ref.model.hf_config_path=/other", "bad", "hf_config_path='/other'"),
    (f"+{PART}.router_replay.mode=R2", "bad", "router_replay.mode='R2'"),
    ("actor_rollout_ref.rollout.top_p=0.9", "bad", "top_p=0.9"),
    ("actor_rollout_ref.rollout.quantization=fp8", "bad", "quantization='fp8'"),
    ("actor_rollout_ref.model.override_config={rms_norm_eps:0.01}", "bad", "override_config.rms_norm_eps=0.01"),
    ("actor_rollout_ref.model.override_config=[a]", "bad", "override_config=['a']"),
    (f"{PART}.vanilla_mbridge=${{VANILLA}}", "unknown", "vanilla_mbridge='${VANILLA}': not judged"),
    ("actor_rollout_ref.ref.megatron.vanilla_mbridge=False", "bad", "ref.megatron.vanilla_mbridge=False"),
    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf-overrides={rms_norm_eps:0.01}", "bad", "hf"),
    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.rope_theta=10000", "bad", "hf_overrides"),
    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.bogus=1", "unknown", "bogus=1: not judged"),
    ("+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8", "bad", "kv_cache_dtype='fp8'"),
    ("actor_rollout_ref.model.lora_rank=8", "bad", "lora_rank=8"),
    (f"{OVER}bogus=1", "unknown", "bogus=1: not judged"),
    (f"{OVER}params_dtype=float16", "unknown", "params_dtype='float16': not judged"),
    (f"{OVER}use_ascend_mc2=True", "bad", "use_ascend_mc2=True: its fused product"),
    (f"{OVER}moe_shared_expert_intermediate_size=64", "bad", "no shared expert"),
    (f"{OVER}hidden_dropout=0.1", "bad", "hidden_dropout=0.1"),
    (f"{PART}.override_transformer_config.apply_rope_fusion=True", "bad", "apply_rope_fusion=True"),
    (f"+{OVER}moe_token_dispatcher_type=flex", "bad", "moe_token_dispatcher_type='flex'"),
    (f"{OVER}layernorm_epsilon=0.001", "bad", "layernorm_epsilon=0.001: the model has"),
    (f"{OVER}rotary_base=5", "bad", "rotary_base=5: the model has"),
    (f"{OVER}layernorm_epsilon=1e-6", "", ""),
    ("+actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "bad", "pipeline_parallel_size=2"),
    ("actor_rollout_ref.rollout.name=sglang", "bad", "name='sglang'"),
    ("actor_rollout_ref.rollout.val_kwargs.temperature=0.3", "", ""),
    ("actor_rollout_ref/something@x=y", "unknown", "it may hold options"),
    ("--config-name my_trainer", "unknown", "--config-name my_trainer"),
    ("actor_rollout_ref.ref.megatron.override_transformer_config.hidden_dropout=0.1", "bad", "ref: hidden_dropout=0.1"),
    ("actor_rollout_ref.ref.megatron.dtype=float32", "bad", "ref: dtype='float32': the actor computes in bfloat16"),
)


def test_a_whole_configuration_passes():
    assert not found() and not [one for one in found(plugged=False) if one.level == "unknown"]
    words = " ".join([*VERL, *MCORE])
    assert not found(words, words)


def test_more_on_the_trainers_command_line():
    lines = wrong(TRAINER, lambda more: found(f"{SCRIPT} {more}"))
    before = found(plugged=False)
    lines += wrong(TRAINER, lambda more: [one for one in found(f"{SCRIPT} {more}", plugged=False) if one not in before])
    lines += wrong(COVERED, lambda more: found(f"{SCRIPT} {more}"))
    assert not lines, "\n".join(lines)


def test_more_on_the_rollouts_command_line():
    lines = wrong(ROLLOUT, lambda more: found(rollout=f"{VLLM} {more}"))
    assert not lines, "\n".join(lines)


def test_more_in_verls_configuration():
    def asked(more):
        both = " ".join([*[one for one in VERL if "model.path" not in more or "model.path" not in one], *MCORE, more])
        return found(both, both)

    lines = wrong(VERLS, asked)
    assert not lines, "\n".join(lines)
    on = [f"+actor_rollout_ref.{name}.enable=True" for name in ("model.mtp", "actor.qat", "actor.megatron.qat")]
    both = " ".join([*VERL, *MCORE, *on])
    assert [one.level for one in found(both, both)] == ["bad"] * 3
    other = " ".join([*VERL, *MCORE, "actor_rollout_ref.rollout.something_new=1", "actor_rollout_ref.rollout.calculate_log_probs=False"])
    notes = [one.what for one in examine(model="Qwen3-30B-A3B", trainer=other, rollout=other).findings if one.level == "note"]
    assert any("verl's own: something_new" in what for what in notes) and any("calculate_log_probs=False: verl does not keep" in what for what in notes)


def test_what_a_launch_script_forgets_is_named_with_what_to_write():
    """Of Megatron-LM's defaults; what is told cures its own finding."""
    got = {one.option: one for one in found(GIVEN)}
    assert {name: one.works for name, one in got.items()} == FORGOTTEN and not [one for one in got.values() if one.level != "bad"]
    assert got["hidden_dropout"].value == 0.1 and got["hidden_dropout"].origin == "Megatron-LM core_v0.16.1's default"
    wrongly = [name for name, cure in FORGOTTEN.items() if {one.option for one in found(f"{GIVEN} {cure}")} != set(FORGOTTEN) - {name}]
    assert not wrongly
    ((finding),) = found(SCRIPT.replace("--bf16", ""))
    assert finding.why.startswith("trainer computes in float32 (megatron-lm without --bf16)")


def test_words_say_that_nothing_was_looked_at():
    notes = [one for one in examine(model="Qwen3-30B-A3B", trainer="tp2+ep2", rollout="tp4").findings if one.topic == "options"]
    assert [one.level for one in notes] == ["note", "note"] and "says nothing about options" in notes[0].what


def test_vllms_defaults_are_judged(tmp_path):
    notes = [one.what for one in examine(model="Qwen3-30B-A3B", trainer=SCRIPT, rollout="-tp 4").findings if one.level == "note"]
    assert any(what.startswith("rollout: temperature=0.6 (of the model's generation_config.json") for what in notes)
    assert any("top_k=20" in what for what in notes) and any("logprobs_mode='raw_logprobs' (vLLM 0.32.0's default)" in what for what in notes)
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"dtype": "float32"}))
    (finding,) = options.rollout(running.rollout("vllm", {}), model_of(str(tmp_path)))
    assert finding.level == "bad" and "dtype='auto' (vLLM 0.32.0's default): the checkpoint is float32" in finding.what


def test_stock_packages_hear_what_moves_a_number():
    words = f"{GIVEN} --hidden-dropout 0"
    said = {(f.side, f.option): f for f in examine(model="Qwen3-30B-A3B", trainer=words, rollout=VLLM, plugged=False).findings if f.topic == "options"}
    assert said["trainer", "attention_dropout"].level == "bad" and ("trainer", "hidden_dropout") not in said
    for name in (("trainer", "transformer_impl"), ("trainer", "attention_backend"), ("rollout", "enable_prefix_caching")):
        assert said[name].level == "note" and said[name].origin.endswith("default")
    assert not said["trainer", "tensor_model_parallel_size"].origin and ("trainer", "tp_comm_overlap") not in said


def test_mindspeeds_options_are_unknown_to_a_stock_run():
    assert {one.level for one in found(f"{SCRIPT} --use-ascend-mc2", plugged=False)} == {"unknown"}


def test_a_name_that_is_nearly_an_option():
    assert [one.works for one in found(f"{SCRIPT} --hiden-dropout 0")] == ["did you mean --hidden-dropout?"]


def test_the_same_model_under_other_names(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))
    (tmp_path / "link").symlink_to(folder)
    for said in (folder, folder / "config.json"):
        assert not found("tp1", f"-tp 1 --generation-config vllm --model {tmp_path / 'link'}", str(said))


def test_a_yaml_of_vllm_holds_mappings_of_its_own(tmp_path):
    (tmp_path / "v.yaml").write_text("tensor-parallel-size: 4\ngeneration-config: vllm\nhf-overrides: {rope_theta: 10000}\nspeculative-config: {model: x}\n")
    assert settings.rollout(str(tmp_path / "v.yaml")).settings["hf_overrides"] == {"rope_theta": 10000}
    assert [one.level for one in found(rollout=str(tmp_path / "v.yaml"))] == ["bad", "bad"]


def test_a_yaml_of_megatron_lm_is_read_as_its_arguments(tmp_path):
    (tmp_path / "m.yaml").write_text("num_layers: 48\ndisable_bias_linear: true\nnorm_epsilon: 1.0e-6\nno_rope_fusion: false\ntensor-model-parallel-size: 2\n")
    read = settings.trainer(str(tmp_path / "m.yaml"))
    assert read.kind == "megatron-lm" and read.running["add_bias_linear"] is False and read.running["layernorm_epsilon"] == 1e-6
    assert read.running["apply_rope_fusion"] is True and not read.running.origin("add_bias_linear")


def test_a_config_json_of_two_minds(tmp_path):
    for name, value in (("model_type", "llama"), ("num_experts", 10**30)):
        (tmp_path / "config.json").write_text(json.dumps(MOE | {name: value}))
        with pytest.raises(ValueError, match=name):
            found("tp1", "tp1", str(tmp_path))


def test_what_nobody_can_know_is_not_accused():
    """Sizes from a checkpoint's arguments, and a trainer in words beside a rollout with a dtype."""
    run = running.trainer("megatron-lm", {"use_checkpoint_args": True, "num_layers": 36, "layernorm_epsilon": 1e-6, "qk_layernorm": True})
    assert not [*between.same_model(run, model_of("Qwen3-8B"))]
    assert not [*between.same_dtype(running.trainer("words", {}), running.rollout("vllm", {"dtype": "float32"}), model_of("Qwen3-8B"))]


def test_verls_command_line():
    words = " ".join(["python3 -m verl.trainer.main_ppo", *VERL, *MCORE])
    trainer, rollout = settings.trainer(words), settings.rollout(words)
    assert (str(trainer.layout), str(rollout.layout)) == ("TP 4 EP 4 ETP 1 SP DP 4", "TP 2")
    for more, said in (([], "strategy is .fsdp, verl's default.*megatron"), (["actor_rollout_ref.actor.strategy=fsdp2"], "strategy is 'fsdp2'")):
        with pytest.raises(ValueError, match=said):
            settings.trainer(" ".join([*VERL, *more]))
    with pytest.raises(ValueError, match="takes a setting away"):
        settings.trainer(f"{words} ~actor_rollout_ref.actor.megatron")
    assert str(settings.trainer(" ".join(["--config-name=ppo_megatron_trainer.yaml", *VERL])).layout) == "TP 1 DP 16"


def test_every_option_of_megatron_core_that_a_row_names_is_judged():
    """Written with a value that no row takes, each is heard of: the start and the doctor read the same rows."""
    from tio_megatron.integrations.option_facts import options as facts

    silent = []
    known = {running.CORE_NAMES.get(name, name) for name in facts("megatron-lm").defaults}
    for rules, _ in options.tables():
        for rule in rules:
            if options._judged_here(rule) and rule.option in known:
                run = running.trainer("megatron-lm", {rule.option: "nobody writes this"})
                silent += [rule.option] * (not any(one.option == rule.option for one in options.trainer(run)))
    # gated_linear_unit follows --swiglu; fp8_recipe and types are judged by others
    assert set(silent) <= {"gated_linear_unit"} and len(known) > 500


def test_a_finding_says_everything_once():
    (finding,) = found(f"{SCRIPT} --hidden-dropout 0.5")
    assert str(finding) == "trainer: hidden_dropout=0.5: dropout is random per layout; --hidden-dropout 0"
    assert finding.to_dict() | {"what": ""} == {
        "level": "bad",
        "topic": "options",
        "side": "trainer",
        "option": "hidden_dropout",
        "what": "",
        "works": finding.works,
    }
    assert re.match("trainer: hidden_dropout=0.5: ", finding.what)
