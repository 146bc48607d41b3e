"""What must be the same in the trainer, the rollout and the model that both read; with and without the contract."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from tio_megatron.findings.finding import Finding, Level
from tio_megatron.verify.doctor.models import Model
from tio_megatron.verify.doctor.options import OFF, OVERRIDES, written
from tio_megatron.verify.doctor.running import CORE_NAMES, SAMPLING_NAMES, Running, dtype

_NEUTRAL = (None, 1, 1.0)

COMPARED = frozenset(
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size num_moe_experts moe_router_topk moe_ffn_hidden_size "
    "layernorm_epsilon rotary_base qk_layernorm moe_router_pre_softmax untie_embeddings_and_output_weights vocab_size padded_vocab_size "
    "use_checkpoint_args".split()
)
"""The trainer's settings that are compared with the model's ``config.json``."""

_WITHOUT = OFF
_GATE = "the model's MLP is silu(gate) * up"
FUNCTION: dict[str, tuple[tuple[object, ...], str]] = {
    "moe_layer_freq": ((None, 1), "the model has experts in every layer"),
    "moe_shared_expert_intermediate_size": (_WITHOUT, "the model has no shared expert"),
    "moe_shared_expert_gate": (_WITHOUT, "the model has no shared expert"),
    "moe_latent_size": (_WITHOUT, "the model has no latent projection"),
    "moe_router_num_groups": (_WITHOUT, "the model's router has no groups"),
    "moe_router_group_topk": (_WITHOUT, "the model's router has no groups"),
    "moe_router_score_function": (("softmax",), "the model's router is a softmax"),
    "moe_router_topk_scaling_factor": ((None, 1, 1.0), "the model's probabilities are not scaled"),
    "moe_router_enable_expert_bias": (_WITHOUT, "the model's router has no bias"),
    "moe_router_force_load_balancing": (_WITHOUT, "experts are chosen at random"),
    "moe_apply_probs_on_input": (_WITHOUT, "the model weights an expert's output"),
    "squared_relu": (_WITHOUT, _GATE),
    "quick_geglu": (_WITHOUT, _GATE),
    "openai_gelu": (_WITHOUT, _GATE),
    "glu_linear_offset": (_WITHOUT, _GATE),
    "activation_func_clamp_value": (_WITHOUT, _GATE),
    "activation_func": ((None, "silu", "swiglu"), _GATE),
    "normalization": (("RMSNorm",), "the model's norms are RMS norms"),
    "layernorm_zero_centered_gamma": (_WITHOUT, "the model multiplies by the norm's weight itself"),
    "apply_residual_connection_post_layernorm": (_WITHOUT, "the model adds the residual before the norm"),
    "add_qkv_bias": (_WITHOUT, "the model has no biases"),
    "qk_l2_norm": (_WITHOUT, "the model's query and key norms are RMS norms"),
    "attention_output_gate": (_WITHOUT, "the model's attention has no gate"),
    "multi_latent_attention": (_WITHOUT, "the model's attention is not latent"),
    "experimental_attention_variant": (_WITHOUT, "the model's attention is a softmax over all keys"),
    "linear_attention_freq": (_WITHOUT, "the model's attention is a softmax over all keys"),
    "softmax_type": ((None, "vanilla"), "the model's attention has no sinks"),
    "window_size": ((None,), "every token sees all before it"),
    "window_attn_skip_freq": ((None,), "every token sees all before it"),
    "apply_query_key_layer_scaling": (_WITHOUT, "scores are scaled once"),
    "softmax_scale": ((None,), "scores are scaled by the root of the head size"),
    "rotary_percent": ((None, 1, 1.0), "whole heads are rotated"),
    "rotary_interleaved": (_WITHOUT, "the rotation pairs the two halves of a head"),
    "rope_scaling": (_WITHOUT, "the model's rotary positions are not scaled"),
    "seq_len_interpolation_factor": ((None, 1, 1.0), "the model's rotary positions are not scaled"),
    "rope_type": ((None, "rope"), "the model's rotary positions are not scaled"),
    "mrope_section": ((None,), "positions have one axis"),
    "no_rope_freq": ((None, 0), "every layer rotates"),
    "reset_position_ids": (_WITHOUT, "positions start again inside of a sequence, in the rollout they do not"),
    "is_hybrid_model": (_WITHOUT, "every layer of the model is built alike"),
    "hybrid_attention_ratio": (_WITHOUT, "every layer of the model is built alike"),
    "hybrid_mlp_ratio": (_WITHOUT, "every layer of the model is built alike"),
    "hybrid_override_pattern": (_WITHOUT, "every layer of the model is built alike"),
    "heterogeneous_layers_config_path": (_WITHOUT, "every layer of the model is built alike"),
    "heterogeneous_layers_config_encoded_json": (_WITHOUT, "every layer of the model is built alike"),
}
"""Settings that no size shows and that make another function of the same weights: what they may be, and what the model is. As written: what a default
does is judged by the rules for the contract."""


def check(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """All of it."""
    yield from same_model(trainer, model)
    yield from same_function(trainer)
    yield from same_vocabulary(trainer, model)
    yield from same_dtype(trainer, rollout, model)
    yield from same_distribution(trainer, rollout, model)


def same_model(run: Running, model: Model) -> Iterator[Finding]:
    """Sizes and constants that Megatron-LM takes from its arguments, verl's overrides lay over its own, and vLLM reads in the model's folder."""
    if run.kind == "words":
        return
    shape = model.shape
    wanted: dict[str, object] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": None if shape.experts else shape.ffn,
        "num_moe_experts": shape.experts or None,
        "moe_router_topk": shape.top_k if shape.experts else None,
        "moe_ffn_hidden_size": shape.moe_ffn if shape.experts else None,
        "layernorm_epsilon": model.rms_eps,
        "rotary_base": model.rope_theta,
        "qk_layernorm": True,
        "moe_router_pre_softmax": False if shape.experts else None,
        "untie_embeddings_and_output_weights": not shape.tied,
    }
    for name, theirs in wanted.items():
        if name not in run or (run.kind == "verl" and name not in laid_over(run)):  # verl makes all others of the model's config.json
            continue
        ours = run[name]
        if name != "num_moe_experts" and (
            ours is None or theirs is None or (type(ours) is int and ours == 0)
        ):  # a size without a default: Megatron-LM asks for it
            continue
        if ours == theirs or (isinstance(ours, int | float) and isinstance(theirs, int | float) and math.isclose(ours, theirs, rel_tol=1e-9)):
            continue
        works = f"leave {OVERRIDES}.{name} out" if run.kind == "verl" else written(run.kind, name, theirs)
        yield Finding(f"the model has {theirs!r}: another function", works, name, ours, "trainer", run.origin(name))


def same_function(run: Running) -> Iterator[Finding]:
    """What the trainer's settings make of the weights beside their sizes (:data:`FUNCTION`)."""
    for name, (fine, why) in FUNCTION.items():
        if name in run.written and run[name] not in fine and not (name == "moe_layer_freq" and _everywhere(run[name])):
            yield Finding(f"{why}: another function", f"leave it out ({' or '.join(map(repr, fine[:2]))})", name, run[name], "trainer")


def laid_over(run: Running) -> frozenset[str]:
    """Names in verl's ``override_transformer_config``, as megatron-core spells them."""
    return frozenset(CORE_NAMES.get(name, name) for name in run.get("override_transformer_config", ())) - frozenset(run.left)


def _everywhere(frequency: object) -> bool:
    """Megatron-LM takes a list too, as text: ``[1]*48``, ``([1]*24+[1]*24)``; without a 0 in it every layer has experts."""
    digits = re.sub(r"\*\s*\d+", "", str(frequency))
    return isinstance(frequency, list | str) and set(re.findall(r"\d+", digits)) == {"1"}


def same_vocabulary(run: Running, model: Model) -> Iterator[Finding]:
    """How many rows the trainer's softmax is over: those that count, and what there is room for."""
    if run.kind == "words":
        return
    rows, place = run.get("tio_vocab_size"), "tio_vocab_size"
    if rows is None:
        rows, place = run.get("vocab_size"), "vocab_size"
        if isinstance(rows, int) and run.get("tokenizer_type") == "NullTokenizer":
            rows, place = rows + 1, "vocab_size (and the end of a text, which NullTokenizer adds)"
    there = model.shape.vocab
    if isinstance(rows, int) and rows != there:
        works = f"--tio-vocab-size {there} (vocab_size of the model's config.json)"
        yield Finding(f"the model has {there}: another number of tokens in the softmax", works, place, rows, "trainer")
    padded = run.get("padded_vocab_size")
    if isinstance(padded, int) and padded < there:
        yield Finding(f"no room for the model's {there} tokens", f"{there} or more", "padded_vocab_size", padded, "trainer")


_TYPES = frozenset({"params_dtype", "pipeline_dtype", "autocast_dtype", "bf16", "fp16"})


def same_dtype(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """What both compute in."""
    left = dtype(trainer)
    for name in sorted(_TYPES & laid_over(trainer)):
        why, works = f"not judged: it is laid over verl's own dtype, which is {left}", "leave it out; actor_rollout_ref.actor.megatron.dtype says it"
        yield Finding(why, works, name, trainer[name], "trainer", level="unknown")
    right = None if rollout.kind == "words" or "dtype" not in rollout else str(rollout["dtype"])
    origin = rollout.origin("dtype")
    if right == "auto":
        right = "bfloat16" if model.dtype == "float32" else model.dtype
        origin = f"auto, {origin}" if origin else "auto"
    if left is not None and right is not None and left != right:
        default = " (megatron-lm without --bf16)" if trainer.kind == "megatron-lm" and left == "float32" else ""
        yield Finding(f"trainer computes in {left}{default}, rollout in {right}{f' ({origin})' if origin else ''}", "the same dtype on both sides")


def same_distribution(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """What the rollout's log-probabilities are of, and whether the trainer's are of the same."""
    if rollout.kind == "words":
        return
    taken = model.sampling if rollout.kind == "vllm" and rollout.get("generation_config") == "auto" else {}
    values = {name: rollout.get(name, taken.get(name)) for name in SAMPLING_NAMES}
    reads = f"of the model's generation_config.json, for requests that set none; generation_config='auto' is {rollout.origin('generation_config') or 'written'}"
    origin = {name: reads if name not in rollout and name in taken else rollout.origin(name) for name in SAMPLING_NAMES}
    temperature, mode = values["temperature"], rollout.get("logprobs_mode")
    processed, hot = str(mode).startswith("processed"), temperature not in (*_NEUTRAL, 0, 0.0)
    if hot and trainer.kind != "verl":
        why, works = (
            "the trainer's log-probabilities must be of logits divided by it too",
            "score with the same temperature; or set temperature 1 in each request",
        )
        yield Finding(why, works, "temperature", temperature, "rollout", origin["temperature"], level="note")
    if hot and not processed and mode is not None:
        why = f"with temperature {temperature} raw log-probabilities are of another distribution than the sampled one"
        level: Level = "bad" if "temperature" in rollout.written else "note"
        yield Finding(why, "logprobs_mode processed_logprobs", "logprobs_mode", mode, "rollout", rollout.origin("logprobs_mode"), level=level)
    why = "tokens are drawn from a cut distribution; "
    why += "processed log-probabilities are of it, a trainer's are not" if processed else "raw log-probabilities are, like a trainer's, of the whole"
    works = "top_k -1 and top_p 1 (--generation-config vllm)" + (", or logprobs_mode raw_logprobs" if processed else " for training on the samples")
    for name in SAMPLING_NAMES[1:]:
        if values[name] not in (None, -1, 0, 1, 1.0, 0.0):
            yield Finding(why, works, name, values[name], "rollout", origin[name], level="bad" if processed else "note")
    if rollout.kind == "verl" and rollout.get("calculate_log_probs") is False:
        why = "verl does not keep the rollout's, so nobody sees a mismatch"
        works = "actor_rollout_ref.rollout.calculate_log_probs=True"
        yield Finding(why, works, "calculate_log_probs", False, "rollout", rollout.origin("calculate_log_probs"), level="note")
