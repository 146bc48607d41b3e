"""What somebody wrote and nobody judged: an option that the other checks do not know never passes in silence.

``unknown`` (exit status 2, could not tell) is what may change a number; ``note`` what only another program can have meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from tio_megatron.contract.messages import named, shown
from tio_megatron.integrations.mindspeed import options as mindspeed_options
from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor import defaults, megatron_names, vllm_names
from tio_megatron.verify.doctor.between import COMPARED, FUNCTION, laid_over
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.held import KEY
from tio_megatron.verify.doctor.options import OFF, ROLLOUT, TOPIC
from tio_megatron.verify.doctor.running import Running, tree_of

LAUNCHER = frozenset(
    """
nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval log_dir redirects
tee standalone role local_addr start_method module use_env world_size tio_contract tio_vocab_size tio_device
nodes ntasks ntasks_per_node gpus gpus_per_node gres cpus_per_task mem time partition account job_name output error exclusive container_image
container_mounts container_name mpi export kill_on_bad_exit label unbuffered
gpu_types ipc shm_size ulimit rm network volume privileged runtime
""".split()
)
"""Of ``torchrun``, of this package, of Slurm and of containers: a launch script holds them too."""

CORE_FIELDS = frozenset(
    "activation_func gated_linear_unit params_dtype pipeline_dtype autocast_dtype init_method output_layer_init_method add_bias_linear "
    "layernorm_epsilon num_moe_experts layernorm_zero_centered_gamma rope_scaling apply_rope_fusion overlap_p2p_comm fp8 fp4 enable_autocast "
    "barrier_with_L1_time batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs variable_seq_lengths timers finalize_model_grads_func "
    "grad_scale_func no_sync_func grad_sync_func param_sync_func virtual_pipeline_model_parallel_size persist_layer_norm memory_efficient_layer_norm "
    "bias_activation_fusion use_kitchen quant_recipe heterogeneous_block_specs cpu_offloading cpu_offloading_activations cpu_offloading_weights "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage grad_reduce_in_fp32 average_in_collective seq_len_interpolation_factor "
    "reduce_scatter_with_fp32_accumulation moe_token_dropping fused_single_qkv_rope use_inference_optimized_layers freeze_moe_router".split()
)
"""Fields of megatron-core's configs that are no argument of Megatron-LM; a YAML and verl's overrides name them."""

_MINDSPEEDS = frozenset(name for name, option in mindspeed_options.NAMES.items() if not option.asked or option.works is None)
"""Judged by :mod:`.mindspeed`."""
_ARGUMENTS = frozenset(defaults.MEGATRON_NAMES.get(name, name) for name in megatron_names.KNOWN) | {"add_bias_linear"}
HARMLESS = frozenset(defaults.MEGATRON_NAMES.get(name, name) for names in megatron_names.NEUTRAL.values() for name in names.split())
_HEARD = frozenset({*defaults.MEGATRON_ARGUMENTS, *defaults.TRANSFORMER_CONFIG, *defaults.VERL_TRAINER, *COMPARED, *FUNCTION})


def check(trainer: Running, rollout: Running, device: str = "cpu", *, plugged: bool = True) -> Iterator[Finding]:
    """Both sides' options that no check has judged on ``device``; ``plugged``: under the contract."""
    yield from of_trainer(trainer, plugged=plugged)
    yield from of_rollout(rollout, device)
    yield from _verls(trainer, rollout)


def of_trainer(run: Running, *, plugged: bool = True) -> Iterator[Finding]:
    """Of Megatron-LM's arguments, a YAML of megatron-core's configs, or verl's overrides of them."""
    judged = _HEARD | HARMLESS | LAUNCHER | (_MINDSPEEDS if plugged else frozenset())
    if run.kind == "words":
        return
    names = run.written if run.kind != "verl" else laid_over(run)
    if run.kind == "megatron-lm" and run.get("yaml_cfg"):
        what = f"trainer: yaml_cfg = {shown(run['yaml_cfg'])}: what that file says was not looked at"
        yield Finding("unknown", TOPIC, what, f"--trainer {run['yaml_cfg']} looks at it")
    strange = []
    for name in sorted(names):
        if name in judged or name.startswith("tio_"):
            continue
        if name in _ARGUMENTS or name in CORE_FIELDS or name in rules():
            if name not in rules() and name not in CORE_FIELDS and run[name] not in OFF:
                yield _unjudged("trainer", name, run[name], "it may change what is computed")
        else:
            strange.append(name)
    whose = "megatron-core 0.16.1's configs have" if run.kind == "verl" else f"{defaults.MEGATRON_LM} has"
    yield from _strange("trainer", strange, whose, _ARGUMENTS | CORE_FIELDS)
    if run.kind == "megatron-lm" and run.get("use_checkpoint_args"):
        yield Finding(
            "unknown",
            TOPIC,
            "trainer: use_checkpoint_args = True: sizes and constants come from the checkpoint's arguments, which were not looked at",
            "leave it out and write them as arguments; or compare the checkpoint's with config.json",
        )


def of_rollout(run: Running, device: str = "cpu") -> Iterator[Finding]:
    """Of vLLM's arguments, or verl's ``engine_kwargs`` for it."""
    if run.kind == "words":
        return
    if run.kind == "vllm" and run.get("config"):
        yield Finding(
            "unknown", TOPIC, f"rollout: config = {shown(run['config'])}: the options in that file were not looked at", f"--rollout {run['config']} looks at it"
        )
    names = run.written if run.kind == "vllm" else frozenset(run.get("engine_kwargs", ())) - frozenset(run.left)
    strange = []
    for written in sorted(names):
        name = written.partition(".")[0]  # --hf-overrides.rope_theta 10000
        if name == "additional_config" and device == "npu":
            continue  # by its keys: on_npu
        if name == "additional_config" and _contract_alone(run, written):
            continue  # held
        if name in vllm_names.DECIDING:
            if run[written] not in (*OFF, "auto", "generate", "{}", "[]", {}, []):
                yield _unjudged("rollout", name, run[written], vllm_names.DECIDING[name])
        elif not _of_vllm(name):
            strange.append(name)
    yield from _strange("rollout", strange, f"{defaults.VLLM} has", frozenset({*vllm_names.DECIDING, *vllm_names.NEUTRAL, *defaults.VLLM_ENGINE}))


def _contract_alone(run: Running, written: str) -> bool:
    """Whether ``additional_config`` names a contract and says nothing else."""
    return written == f"additional_config.{KEY}" or set(tree_of(run[written]) or ()) == {KEY}


def _verls(trainer: Running, rollout: Running) -> Iterator[Finding]:
    """verl has hundreds of settings of its own, most about the loop: those that no table knows are named, and count as nothing."""
    verl_rules = {rule.option.rpartition(".")[2] for rule in (*refusals.SIDE_RULES, *refusals.ROLLOUT_RULES)} | rules()
    known = {*_HEARD, *HARMLESS, *_ARGUMENTS, *CORE_FIELDS, *defaults.VERL_ROLLOUT, *vllm_names.DECIDING, *LAUNCHER}
    for side, run in (("trainer", trainer), ("rollout", rollout)):
        own = {"model_path", "model_lora_rank", "override_transformer_config", "engine_kwargs", "actor_rollout_ref"}
        own |= {*run.get("override_transformer_config", ()), *run.get("engine_kwargs", ()), *verl_rules}
        left = [name for name in run.written if run.kind == "verl" and name not in known | own and not _of_vllm(name)]
        if left:
            yield Finding("note", TOPIC, f"{side}: not judged, as verl's own: {named(left, most=24)}")


def judged_of_trainer() -> frozenset[str]:
    """Names, as megatron-core has them, of which some check of the doctor has something to say."""
    return _HEARD | CORE_FIELDS | rules() | frozenset(defaults.MEGATRON_NAMES.get(name, name) for name in megatron_names.DECIDING.split())


def _of_vllm(name: str) -> bool:
    more = {*defaults.VLLM_ENGINE, *ROLLOUT, "tp", "tensor_parallel", "expert_parallel_size", "tensor_model_parallel_size"}
    return any(name in known for known in (vllm_names.JUDGED, vllm_names.NEUTRAL, vllm_names.SERVER, LAUNCHER, more))


def _unjudged(side: str, name: str, value: Any, why: str) -> Finding:
    return Finding("unknown", TOPIC, f"{side}: {name} = {shown(value)} is not judged: {why}", "leave it out, or compare with a run without it (tio logdiff)")


def _strange(side: str, names: Iterable[str], whose: str, known: frozenset[str]) -> Iterator[Finding]:
    for name in names:
        near = difflib.get_close_matches(name, known, 1, 0.85)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else "leave it out; an option of your own script may change what is computed"
        yield Finding("unknown", TOPIC, f"{side}: {name} is not judged: {whose} no such option", hint)


def rules() -> frozenset[str]:
    """What a model, its optimizer or a script is refused by, where megatron-core is installed; :func:`.options.trainer` says where it is not."""
    import importlib.util

    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        return frozenset()
    from tio_megatron.integrations.megatron_lm.defaults import SCRIPT_RULES
    from tio_megatron.verify.doctor.options import _rules as rules

    return frozenset(rule.option for rule in (*rules(True), *SCRIPT_RULES))
