"""What a model may not ask for under a contract: each option refused by its name, with the reason and what works."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.contract import Contract, Layout, LayoutProblem, ModelShape
from tio_megatron.findings.finding import OFF, Finding, Rule, broken, refuse, verdict
from tio_megatron.integrations.megatron.modules.expert_spec import moe_refusals
from tio_megatron.integrations.megatron.versions import FULL, release
from tio_megatron.integrations.mindspeed.refusals import mindspeed_refusals

CONFIG_RULES = (
    Rule("hidden_dropout", (0.0,), "dropout is random per layout"),
    Rule("attention_dropout", (0.0,), "dropout is random per layout"),
    Rule("hybrid_context_parallel", OFF, "groups that differ from sample to sample are not supported"),
    Rule("params_dtype", (torch.bfloat16, torch.float32), "only these element types have kernels"),
    Rule("fp16", OFF, "half precision has no kernels"),
    Rule("fp8", (None,), "quantized products have no fixed order"),
    Rule("fp4", (None,), "quantized products have no fixed order"),
    Rule("quant_recipe", (None,), "quantized products have no fixed order"),
    Rule("enable_autocast", OFF, "it changes dtypes behind the layers"),
    Rule("fp32_residual_connection", OFF, "the rollout keeps the residual in the activation dtype"),
    Rule("apply_residual_connection_post_layernorm", OFF, "the rollout adds the residual before the norm"),
    Rule("normalization", ("RMSNorm",), "no other norm has a kernel"),
    Rule("layernorm_zero_centered_gamma", OFF, "the norm multiplies by the weight itself"),
    Rule("qk_l2_norm", OFF, "query and key norms are RMSNorm (qk_layernorm=True)"),
    Rule("qk_clip", OFF, "it needs the largest attention score"),
    Rule("log_max_attention_logit", OFF, "the attention does not give its largest score away"),
    Rule("add_bias_linear", OFF, "biases are not supported"),
    Rule("add_qkv_bias", OFF, "biases are not supported"),
    Rule("gated_linear_unit", (True,), "the MLP is silu(gate) * up"),
    Rule("activation_func", (F.silu,), "the MLP is silu(gate) * up"),
    Rule("activation_func_clamp_value", (None,), "the activation is not clamped"),
    Rule("glu_linear_offset", (0.0,), "the activation has no offset"),
    Rule("use_te_activation_func", OFF, "the activation is ours"),
    Rule("multi_latent_attention", OFF, "latent attention is not supported"),
    Rule("experimental_attention_variant", (None,), "only softmax attention is supported"),
    Rule("attention_output_gate", OFF, "gated attention is not supported"),
    Rule("window_size", (None,), "sliding windows are not supported"),
    Rule("softmax_type", ("vanilla",), "attention sinks are not supported"),
    Rule("apply_query_key_layer_scaling", OFF, "scores are scaled once"),
    Rule("rotary_interleaved", OFF, "the rotation pairs the two halves of a head"),
    Rule("apply_rope_fusion", OFF, "the fused rotation has other roundings"),
    Rule("fused_single_qkv_rope", OFF, "the fused rotation has other roundings"),
    Rule("no_rope_freq", (None,), "every layer rotates"),
    Rule("mrope_section", (None,), "positions have one axis"),
    Rule("cross_entropy_loss_fusion", OFF, "the fused loss sums in its own order"),
    Rule("mtp_num_layers", (None, 0), "multi-token prediction is not supported"),
    Rule("defer_embedding_wgrad_compute", OFF, "gradients are computed in the backward pass"),
    Rule("delay_wgrad_compute", OFF, "gradients are computed in the backward pass"),
    Rule("tp_comm_overlap", OFF, "the overlapped products sum in their own order"),
    Rule("symmetric_ar_type", (None,), "vendor all-reduces sum in their own order"),
    Rule("batch_invariant_mode", OFF, "megatron-core's own mode replaces operators for CUDA and would fight with ours"),
    Rule("cpu_offloading", OFF, "offloading is not supported"),
    Rule("fine_grained_activation_offloading", OFF, "offloading is not supported"),
    Rule("enable_cuda_graph", OFF, "CUDA graphs are not supported"),
    Rule("external_cuda_graph", OFF, "CUDA graphs are not supported"),
    Rule("cuda_graph_impl", ("none", None), "CUDA graphs are not supported"),
    Rule("flash_decode", OFF, "inference engines of megatron-core are not supported"),
    Rule("use_inference_optimized_layers", OFF, "inference engines of megatron-core are not supported"),
    Rule("use_kitchen", OFF, "quantized products have no fixed order"),
    Rule("heterogeneous_block_specs", OFF, "every layer is built alike"),
    Rule("is_hybrid_model", OFF, "state-space layers are not supported"),
    Rule("test_mode", OFF, "it computes on the side"),
)
CONTEXT_RULES = (
    Rule("cp_comm_type", (None, "p2p", "all_gather", "a2a", "a2a+p2p"), "all of megatron-core's values name the same movement here, for all layers alike"),
)
MODEL_RULES = (
    Rule("position_embedding_type", ("rope",), "only rotary positions have a kernel"),
    Rule("rotary_percent", (1.0,), "whole heads are rotated"),
    Rule("rope_scaling", OFF, "scaled rotary positions are not supported"),
    Rule("seq_len_interpolation_factor", (None,), "scaled rotary positions are not supported"),
    Rule("mtp_block_spec", (None,), "multi-token prediction is not supported"),
)


QUANTIZED = tuple(rule for rule in CONFIG_RULES if rule.option in ("fp8", "fp4"))


def check_early(config: TransformerConfig) -> None:
    """Refuse, as soon as a configuration asks for them, FP8 and FP4 (stock's own checks, which come next, die without Transformer Engine) and what
    stock's next check refuses in words of its own or none.

    Raises:
        ValueError: names the option.
    """
    lines = broken(QUANTIZED, config)
    if release().wants_slices and min(config.tensor_model_parallel_size, config.expert_model_parallel_size) > 1 and not config.sequence_parallel:
        why = f"megatron-core {release().version} refuses it with TP and EP"
        lines.append(Finding(why, f"True, or megatron-core {FULL}, would work", "sequence_parallel", False))
    refuse("this configuration cannot run under the contract", lines)


def check(config: TransformerConfig, arguments: Mapping[str, Any], contract: Contract, vocab: int) -> None:
    """Refuse a model that the contract cannot hold.

    Args:
        config: the model's.
        arguments: of ``GPTModel``, with defaults filled in.
        contract: in force.
        vocab: true vocabulary.

    Raises:
        ValueError: lists every option by name, and every product whose cut does not fall on leaves, each with what would work.
    """
    lines = broken(CONFIG_RULES, config) + broken(MODEL_RULES, arguments)
    if config.context_parallel_size > 1:
        lines += broken(CONTEXT_RULES, config)
    if config.num_moe_experts:
        named = {finding.option for finding in lines}
        lines += [finding for finding in moe_refusals(config) if finding.option not in named]
    lines += mindspeed_refusals(config) + unknown_options(config)
    verdict("this model cannot run under the contract", lines or _misfits(config, contract, vocab))


def unknown_options(config: TransformerConfig) -> list[Finding]:
    """One finding per option that is on and that only a release after the fully supported one has: what it changes was not looked at."""
    why = f"megatron-core {release().version} has this option and {FULL} does not, so it was not looked at"
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return broken(tuple(Rule(option, (defaults[option],), why) for option in release().new_options), config)


def _misfits(config: TransformerConfig, contract: Contract, vocab: int) -> Iterator[LayoutProblem]:
    """Products whose cut does not fall on leaves. How layers are spread over pipeline stages is megatron-core's own affair."""
    tp = config.tensor_model_parallel_size
    layout = Layout(
        tp=tp,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        sp=config.sequence_parallel and tp > 1,
        cp=config.context_parallel_size,
    )
    shape = ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab=vocab,
        ffn=config.ffn_hidden_size,
        experts=config.num_moe_experts or 0,
        top_k=config.moe_router_topk if config.num_moe_experts else 0,
        moe_ffn=(config.moe_ffn_hidden_size or config.ffn_hidden_size) if config.num_moe_experts else 0,
    )
    yield from contract.problems(layout, shape)
