"""What somebody wrote and nobody judged: an option that the other checks do not know never passes in silence.

``unknown`` (exit status 2, could not tell) is what may change a number; ``note`` what only another program can have meant.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tio_megatron.findings.finding import Finding
from tio_megatron.findings.messages import named
from tio_megatron.integrations.mindspeed import options as mindspeed_options
from tio_megatron.integrations.option_facts import RELEASE, options
from tio_megatron.integrations.verl import refusals
from tio_megatron.integrations.vllm import refused_options
from tio_megatron.verify.doctor import options as rows
from tio_megatron.verify.doctor.between import COMPARED, FUNCTION, laid_over
from tio_megatron.verify.doctor.held import KEY
from tio_megatron.verify.doctor.options import OFF
from tio_megatron.verify.doctor.running import CORE_NAMES, SAMPLING_NAMES, Running, mapping_of

LAUNCHER = frozenset(
    """
nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval log_dir redirects
tee standalone role local_addr start_method module use_env world_size tio_contract tio_vocab_size tio_device
""".split()
)
"""Of ``torchrun`` and of this package."""

UNJUDGED = frozenset(
    "bias_gelu_fusion disable_jit_fuser error_injection_rate fp16_lm_cross_entropy load_main_params_from_ckpt moe_extended_tp rope_type spec "
    "te_precision_config_file use_kitchen_attention use_mp_args_from_checkpoint_args".split()
)
"""Megatron-LM's arguments that may change what is computed and that no row judges. All others of the release are judged, or time, memory, data and logs."""

_READ = frozenset("model hf_overrides override_generation_config load_format max_model_len logprobs_mode dtype kv_cache_dtype block_size".split())
"""vLLM's options that other checks read, beside the rows."""


def check(trainer: Running, rollout: Running, device: str = "cpu", *, plugged: bool = True) -> Iterator[Finding]:
    """Both sides' options that no check has judged on ``device``; ``plugged``: under the contract."""
    yield from of_trainer(trainer, plugged=plugged)
    yield from of_rollout(rollout, device)
    yield from _verls(trainer, rollout)


def of_trainer(run: Running, *, plugged: bool = True) -> Iterator[Finding]:
    """Of Megatron-LM's arguments, a YAML of megatron-core's configs, or verl's overrides of them."""
    if run.kind == "words":
        return
    known = _megatrons() | COMPARED | FUNCTION.keys() | rules() | LAUNCHER
    known |= {name for name, option in mindspeed_options.NAMES.items() if plugged and not option.asked}
    names = run.written if run.kind != "verl" else laid_over(run)
    if run.kind == "megatron-lm" and run.get("yaml_cfg"):
        why = "what that file says was not looked at"
        yield Finding(why, f"--trainer {run['yaml_cfg']} looks at it", "yaml_cfg", run["yaml_cfg"], "trainer", level="unknown")
    if run.kind == "megatron-lm" and run.get("use_checkpoint_args"):
        why = "sizes and constants come from the checkpoint's arguments, which were not looked at"
        works = "leave it out and write them as arguments; or compare the checkpoint's with config.json"
        yield Finding(why, works, "use_checkpoint_args", True, "trainer", level="unknown")
    for name in sorted(names & UNJUDGED):
        if run[name] not in OFF:
            yield _unjudged("trainer", name, run[name], "it may change what is computed")
    whose = f"{RELEASE['megatron-core']}'s configs have" if run.kind == "verl" else f"{RELEASE['megatron-lm']} has"
    yield from _strange(run, "trainer", (name for name in names - known if not name.startswith("tio_")), whose, known)
    judged = rules() | COMPARED | FUNCTION.keys() | UNJUDGED | options("verl").defaults["trainer"].keys() if run.kind == "verl" else None
    yield from _left(run, "trainer", lambda name: name in judged if judged is not None else name not in known or name in rules() | COMPARED | FUNCTION.keys())


def of_rollout(run: Running, device: str = "cpu") -> Iterator[Finding]:
    """Of vLLM's arguments, or verl's ``engine_kwargs`` for it."""
    if run.kind == "words":
        return
    if run.kind == "vllm" and run.get("config"):
        why = "the options in that file were not looked at"
        yield Finding(why, f"--rollout {run['config']} looks at it", "config", run["config"], "rollout", level="unknown")
    known = vllms()
    names = run.written if run.kind == "vllm" else frozenset(run.get("engine_kwargs", ())) - frozenset(run.left)
    strange = []
    for written in sorted(names):
        name = written.partition(".")[0]  # --hf-overrides.rope_theta 10000
        if name == "additional_config" and (device == "npu" or set(mapping_of(run, name)) == {KEY}):
            continue  # by its keys: on_npu; or held
        if name in refused_options.UNJUDGED:
            if run[written] not in (*OFF, "auto", "generate"):
                yield _unjudged("rollout", name, run[written], refused_options.UNJUDGED[name])
        elif name not in known:
            strange.append(name)
    yield from _strange(run, "rollout", strange, f"{RELEASE['vllm']} has", known)
    judged = {rule.option for rule in refused_options.RULES} | refused_options.UNJUDGED.keys() | set(SAMPLING_NAMES) | _READ
    yield from _left(run, "rollout", lambda name: name in judged or (run.kind == "vllm" and name not in known))


def _left(run: Running, side: str, decides: Any) -> Iterator[Finding]:
    """Variables that are not known, where they may change a number."""
    for name, value in sorted(run.left.items()):
        if decides(name):
            yield Finding("not judged: a variable that is not set here", "write it out", name, value, side, level="unknown")


def _verls(trainer: Running, rollout: Running) -> Iterator[Finding]:
    """verl has hundreds of settings of its own, most about the loop: those that no table knows are named, and count as nothing."""
    verl_rules = {rule.option.rpartition(".")[2] for rule in (*refusals.SIDE_RULES, *refusals.ROLLOUT_RULES)}
    verls: Mapping[str, Mapping[str, Any]] = options("verl").defaults
    known = _megatrons() | COMPARED | FUNCTION.keys() | rules() | LAUNCHER | vllms() | verls["rollout"].keys() | verls["trainer"].keys() | verl_rules
    for side, run in (("trainer", trainer), ("rollout", rollout)):
        own = {"model_path", "override_transformer_config", "engine_kwargs", refusals.TREE}
        own |= {*run.get("override_transformer_config", ()), *run.get("engine_kwargs", ())}
        if run.kind == "verl" and (left := sorted(run.written - known - own)):
            yield Finding(f"not judged, as verl's own: {named(left, most=24)}", side=side, level="note")


def vllms() -> frozenset[str]:
    """Names of vLLM's options, of its server's too, and what a request says."""
    more = {"tp", "tensor_parallel", "expert_parallel_size", "tensor_model_parallel_size", "name", "model_tag"}
    return frozenset({*options("vllm").defaults, *SAMPLING_NAMES, *more, *LAUNCHER})


def _megatrons() -> frozenset[str]:
    """Names of Megatron-LM's arguments and of the fields of megatron-core's configurations."""
    return frozenset({*(CORE_NAMES.get(name, name) for name in options("megatron-lm").defaults), *options("megatron-core").defaults})


def _unjudged(side: str, name: str, value: Any, why: str) -> Finding:
    return Finding(f"not judged: {why}", "leave it out, or compare with a run without it (tio logdiff)", name, value, side, level="unknown")


def _strange(run: Running, side: str, names: Iterable[str], whose: str, known: frozenset[str]) -> Iterator[Finding]:
    for name in sorted(names):
        near = difflib.get_close_matches(name, known, 1, 0.85)
        works = f"did you mean --{near[0].replace('_', '-')}?" if near else "leave it out; an option of your own script may change what is computed"
        yield Finding(f"not judged: {whose} no such option", works, name, run[name], side, level="unknown")


def rules() -> frozenset[str]:
    """What a model, its optimizer or a script is refused by, where megatron-core is installed; :func:`.options.trainer` says where it is not."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        return frozenset()
    return frozenset(rule.option for table, _ in rows.tables() for rule in table)
