"""What of verl's own settings a contract does not cover, refused by its name when a worker builds its models, with what would work.

What verl hands on is refused further down: megatron-core's options by :mod:`..megatron.refusals`, vLLM's by :mod:`..vllm.refusals`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.finding import OFF, Finding, Rule, broken, refuse

TREE = "actor_rollout_ref"
_ALONE, _BOTH = "the {side} alone would be another model", "leave it out, or change config.json, which both sides read"
_HARMLESS = re.compile(r"_?attn_implementation|freeze_moe_router|moe_config|max_position_embeddings|\w+_token_id|torch_dtype|dtype")
"""Of ``model.override_config``: what only classes of transformers read, a bound, a token's number, or what is trained (``moe_config`` is older verl's, and read
no more). The element type is ``actor.megatron.dtype``'s."""
_LAYERS = "only Megatron's layers are ours"
_BRIDGE = "mbridge builds the model of layers that the contract converts; another bridge asks for Transformer Engine's, and its export was never run"

SIDE_RULES = (
    Rule("strategy", ("megatron",), _LAYERS),
    Rule("megatron.use_mbridge", (True,), _BRIDGE),
    Rule("megatron.vanilla_mbridge", (True,), _BRIDGE),
    Rule("megatron.use_megatron_fsdp", OFF, "it gathers weights and reduces gradients in its own order"),
    Rule("megatron.dynamic_context_parallel", OFF, "how a sequence is cut would depend on the batch"),
    Rule("megatron.router_replay.mode", ("disabled", None), "the experts would be those of another pass; under the contract both sides choose alike"),
    Rule("megatron.qat.enable", OFF, "quantized weights have no kernels"),
    Rule("qat.enable", OFF, "quantized weights have no kernels"),
    Rule("use_fused_kernels", OFF, "they compute log-probabilities in their own order"),
)
"""Of ``actor_rollout_ref.actor`` and ``.ref``."""

MODEL_RULES = (
    Rule("use_fused_kernels", OFF, "they compute log-probabilities in their own order"),
    Rule("lora_rank", (0, None), "adapters are not covered"),
    Rule("lora.rank", (0, None), "adapters are not covered"),
    Rule("mtp.enable", OFF, "multi-token prediction is not covered"),
)
"""Of ``actor_rollout_ref.model``."""

ROLLOUT_RULES = (
    Rule("name", ("vllm",), "only vLLM has layers here"),
    Rule("top_p", (1, 1.0, None), "the rollout's log-probabilities would be those of the cut distribution, and the trainer's are not"),
    Rule("top_k", (-1, 0, None), "the rollout's log-probabilities would be those of the cut distribution, and the trainer's are not"),
    Rule("quantization", (None,), "quantized products have no fixed order"),
    Rule("enable_rollout_routing_replay", OFF, "the experts would be those of another pass; under the contract both sides choose alike"),
)
"""Of ``actor_rollout_ref.rollout``."""


MODELS_OWN = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon softmax_scale normalization qk_layernorm "
    "layernorm_zero_centered_gamma add_qkv_bias add_bias_linear activation_func gated_linear_unit num_moe_experts moe_ffn_hidden_size moe_router_topk "
    "moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_shared_expert_intermediate_size "
    "moe_shared_expert_gate moe_layer_freq rotary_interleaved window_size no_rope_freq params_dtype".split()
)
"""Fields of megatron-core's configuration that say which function of the weights a model is. The rollout reads them in ``config.json``."""


def check_overrides(before: Mapping[str, Any], after: Any) -> None:
    """Refuse an override that makes the trainer another model than the rollout.

    Args:
        before: what ``config.json`` says, for the fields that are overridden.
        after: the configuration with the overrides.

    Raises:
        ValueError: lists the fields.
    """
    place, works = f"{TREE}.actor.megatron.override_transformer_config", "leave it out, or change config.json"
    _refuse(
        Finding(f"the model's config.json says {value!r}, and vLLM reads that", works, f"{place}.{name}", getattr(after, name))
        for name, value in before.items()
        if getattr(after, name) != value
    )


def check(config: Mapping[str, Any], role: str) -> None:
    """Refuse what the contract does not cover.

    Args:
        config: verl's ``actor_rollout_ref``.
        role: of the worker: which of actor, rollout and ref it holds.

    Raises:
        ValueError: lists everything by the name under which verl takes it.
    """
    _refuse(problems(config, role))


def _refuse(found: Iterable[Finding]) -> None:
    refuse("verl cannot obey the contract", found)


def problems(config: Mapping[str, Any], role: str, said: Mapping[str, Any] | None = None) -> list[Finding]:
    """Each thing that :func:`check` refuses; ``said``: of :func:`other_model`."""
    found = [finding for side in ("actor", "ref") if side in role for finding in _broken(SIDE_RULES, config, side)]
    found += [*_broken(MODEL_RULES, config, "model"), *_one_model(config, said)]
    if "rollout" in role:
        found += [*_broken(ROLLOUT_RULES, config, "rollout"), *_raw(config)]
    return found


def other_model(config: Mapping[str, Any], said: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What ``model.override_config`` says that makes another model than the one of config.json.

    Args:
        config: verl's ``actor_rollout_ref``.
        said: what config.json says; by default it is read, where ``model.path`` is a folder of this machine.
    """
    laid = _laid(config)
    said = _config_json(_asked(config, "model.path", None)) if said is None else said
    fine = {name for name in laid if _HARMLESS.fullmatch(str(name)) or (name in said and said[name] == laid[name])} if isinstance(laid, Mapping) else set()
    return {str(name): value for name, value in laid.items() if name not in fine} if isinstance(laid, Mapping) else {}


def _laid(config: Mapping[str, Any]) -> Any:
    laid: Any = _asked(config, "model.override_config", None) or {}
    return laid.get("model_config", laid) or {} if isinstance(laid, Mapping) else laid


def _config_json(folder: Any) -> Mapping[str, Any]:
    path = Path(os.path.expanduser(str(folder))) / "config.json"
    try:
        held = read_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):  # verl's own reader names it
        return {}
    return held if isinstance(held, Mapping) else {}


def _one_model(config: Mapping[str, Any], said: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What one side alone would read in the place of the model's config.json."""
    laid = _laid(config)
    if not isinstance(laid, Mapping):
        yield Finding("a mapping of settings is read", "leave it out", f"{TREE}.model.override_config", laid)
    for name, value in other_model(config, said).items():
        yield Finding(_ALONE.format(side="trainer"), _BOTH, f"{TREE}.model.override_config.{name}", value)
    path, other = _asked(config, "model.path", None), _asked(config, "model.hf_config_path", None)
    if other is not None and str(other).rstrip("/") != str(path).rstrip("/"):
        yield Finding("the trainer would read another config.json than vLLM", "leave it out", f"{TREE}.model.hf_config_path", other)
    given = _asked(config, "rollout.engine_kwargs.vllm", None)
    for name in given if isinstance(given, Mapping) else ():
        if _vllms(name) in ("hf_overrides", "hf_config_path") and given[name]:
            yield Finding(_ALONE.format(side="rollout"), _BOTH, f"{TREE}.rollout.engine_kwargs.vllm.{name}", given[name])


def _raw(config: Mapping[str, Any]) -> Iterator[Finding]:
    """verl lays ``engine_kwargs`` over the arguments that it makes of its own settings."""
    temperature = _asked(config, "rollout.temperature", 1.0)
    modes = [("logprobs_mode", _asked(config, "rollout.logprobs_mode", None))]
    given = _asked(config, "rollout.engine_kwargs.vllm", None)
    modes += [
        (f"engine_kwargs.vllm.{name}", given[name])
        for name in (given if isinstance(given, Mapping) else ())
        if _vllms(name) == "logprobs_mode" and given[name] is not None
    ]
    for name, mode in modes[-1:]:
        if mode not in ("processed_logprobs", None) and not (mode == "raw_logprobs" and temperature == 1):
            works = "'processed_logprobs' would work, or 'raw_logprobs' at temperature 1"
            why = f"the temperature is {temperature}, and the trainer divides its logits by it"
            yield Finding(why, works, f"{TREE}.rollout.{name}", mode)


def _vllms(name: Any) -> str:
    """A key of ``engine_kwargs`` as vLLM names the option: its parser takes ``-`` and ``_``, and ``hf_overrides.rope_theta``."""
    return str(name).lstrip("-").replace("-", "_").partition(".")[0]


def _broken(rules: tuple[Rule, ...], config: Mapping[str, Any], side: str) -> list[Finding]:
    asked = {rule.option: _asked(config, f"{side}.{rule.option}", rule.works[0]) for rule in rules}
    return [replace(finding, option=f"{TREE}.{side}.{finding.option}") for finding in broken(rules, asked)]


def _asked(config: Any, path: str, missing: Any) -> Any:
    """A setting by its dotted name; ``missing`` where this configuration does not have it."""
    for name in path.split("."):
        if not isinstance(config, Mapping) and not hasattr(config, "get"):
            return missing
        config = config.get(name, missing)
        if config is missing:
            return missing
    return config
