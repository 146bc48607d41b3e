"""Settings of either side that the contract does not cover, found before anything is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from tio_megatron.verify.doctor.findings import Finding

TOPIC = "options"
BLOCK = 64
"""Keys in one block of the attention walk of the cpu family; a page holds whole blocks."""

ARGUMENTS = {
    "fp8_format": "fp8",
    "fp8": "fp8",
    "swiglu": "",
    "no_rope_fusion": "",
    "position_embedding_type": "",
    "normalization": "normalization",
}
"""Megatron-LM arguments whose name is not that of the config's field; an empty one is looked at elsewhere."""

OFF = (None, False, 0, 0.0, "", "none", "None", "null")


def trainer(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Megatron settings against the rules that a model is refused by when it is built (dropout, FP8, capacity, ...)."""
    if not settings:
        return
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        yield Finding("unknown", TOPIC, "megatron-core is not installed here: the trainer's options were not looked at", "run it where the trainer runs")
        return
    from tio_megatron.integrations.megatron.moe_refusals import MOE_RULES
    from tio_megatron.integrations.megatron.refusals import CONFIG_RULES, MODEL_RULES

    named = {ARGUMENTS.get(name, name): value for name, value in settings.items()}
    seen = set()
    for rule in (*CONFIG_RULES, *MOE_RULES, *MODEL_RULES):
        value = named.get(rule.option)
        if rule.option in seen or value is None or rule.option in ("params_dtype", "activation_func"):
            continue
        seen.add(rule.option)
        works = [work for work in rule.works if not callable(work)]
        if not any(value == work or (work in OFF and value in OFF) for work in works):
            yield Finding("bad", TOPIC, f"trainer: {rule.option} = {value!r}: {rule.why}", " or ".join(map(repr, works)) + " would work")
    yield from _balance(named)
    if named.get("swiglu") is False or named.get("add_bias_linear") is True:
        yield Finding("bad", TOPIC, "trainer: biases or another activation than SwiGLU", "--swiglu --disable-bias-linear would work")
    if named.get("virtual_pipeline_model_parallel_size") not in OFF or named.get("num_layers_per_virtual_pipeline_stage") not in OFF:
        yield Finding(
            "bad",
            TOPIC,
            "trainer: virtual pipeline stages are not handled by weight export and checkpoints",
            "leave --num-layers-per-virtual-pipeline-stage out",
        )


def _balance(named: Mapping[str, Any]) -> Iterator[Finding]:
    kinds = named.get("moe_router_load_balancing_type", "aux_loss" if named.get("moe_aux_loss_coeff") else None)
    weight = named.get("moe_aux_loss_coeff")
    for kind, one in zip(*(value if isinstance(value, list) else [value] for value in (kinds, weight)), strict=False):
        if kind not in (None, "none", "seq_aux_loss") and (one not in OFF or kind == "sinkhorn"):
            yield Finding(
                "bad",
                TOPIC,
                f"trainer: moe_router_load_balancing_type = {kind!r}: its value depends on the micro-batch",
                "seq_aux_loss, or --moe-aux-loss-coeff 0, would work",
            )


ROLLOUT = {
    "quantization": ("quantized products have no fixed order", "an unquantized checkpoint"),
    "enable_lora": ("adapters are not covered", "merge the adapter into the checkpoint"),
    "speculative_config": ("speculative decoding is not covered", "leave it out"),
    "enable_eplb": ("expert load balancing moves experts between ranks", "leave it out"),
    "enable_dbo": ("dual batch overlap is not covered", "leave it out"),
    "enable_prompt_embeds": ("prompts are token ids", "leave it out"),
    "kv_transfer_config": ("keys and values from elsewhere are not covered", "leave it out"),
}
"""vLLM arguments that must be off: why, and what works."""


def rollout(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """vLLM arguments against what an engine is refused by when it is built."""
    for name, (why, works) in ROLLOUT.items():
        if why and settings.get(name) not in OFF:
            yield Finding("bad", TOPIC, f"rollout: {name} = {settings[name]!r}: {why}", works)
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if settings.get(name) not in (*OFF, 1):
            more = "; start one engine per replica" if name == "data_parallel_size" else ""
            yield Finding("bad", TOPIC, f"rollout: {name} = {settings[name]!r} is not covered", f"1 would work{more}")
    if settings.get("kv_cache_dtype", "auto") not in ("auto", "bfloat16", "float32"):
        yield Finding("bad", TOPIC, f"rollout: kv_cache_dtype = {settings['kv_cache_dtype']!r}: keys and values would be rounded once more", "auto would work")
    if str(settings.get("dtype", "auto")) not in ("auto", "bfloat16", "float32"):
        yield Finding("bad", TOPIC, f"rollout: dtype = {settings['dtype']!r}", "bfloat16 or float32, the trainer's, would work")
    block = settings.get("block_size")
    if isinstance(block, int) and block % BLOCK:
        yield Finding("bad", TOPIC, f"rollout: block_size = {block}: a page must hold whole blocks of keys", f"a multiple of {BLOCK} would work")


def both(trainer_settings: Mapping[str, Any], rollout_settings: Mapping[str, Any]) -> Iterator[Finding]:
    """What must be the same on both sides."""
    temperature = rollout_settings.get("temperature")
    if temperature not in (None, 1, 1.0):
        yield Finding(
            "note",
            TOPIC,
            f"rollout: temperature = {temperature}: the trainer's log-probabilities must be of logits divided by it too",
            "score with the same temperature",
        )
    mode = rollout_settings.get("logprobs_mode")
    if mode is not None and mode != "processed_logprobs" and temperature not in (None, 1, 1.0):
        yield Finding(
            "bad",
            TOPIC,
            f"rollout: logprobs_mode = {mode!r} with temperature {temperature}: raw log-probabilities are of another distribution than the sampled one",
            "processed_logprobs",
        )
    dtypes = [_dtype(trainer_settings), str(rollout_settings.get("dtype", "")) or None]
    if None not in dtypes and "auto" not in dtypes and dtypes[0] != dtypes[1]:
        yield Finding("bad", TOPIC, f"trainer computes in {dtypes[0]}, rollout in {dtypes[1]}", "the same dtype on both sides")


def _dtype(settings: Mapping[str, Any]) -> str | None:
    if settings.get("bf16"):
        return "bfloat16"
    if settings.get("fp16"):
        return "float16"
    return None
