"""Options of an expert layer that would change a sum, or which tokens an expert sees, and are therefore refused by name."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.findings.finding import OFF, Finding, Rule, broken, refuse

_DROPS = "tokens would be dropped"
_GROUPS = "group-limited routing is not in the contract"
_PLAIN = "experts are plain SwiGLU"

MOE_RULES = (
    Rule("moe_z_loss_coeff", (None, 0.0), "the z-loss is not in the contract"),
    Rule("moe_input_jitter_eps", (None, 0.0), "noise on the router's input"),
    Rule("moe_router_force_load_balancing", OFF, "random routing"),
    Rule("moe_router_num_groups", (None,), _GROUPS),
    Rule("moe_router_group_topk", (None,), _GROUPS),
    Rule("moe_router_score_function", ("softmax",), "other scores are not in the contract"),
    Rule("moe_router_topk_scaling_factor", (None, 1.0), "scaled probabilities are not in the contract"),
    Rule("moe_router_enable_expert_bias", OFF, "a bias that follows the load depends on the batch"),
    Rule("moe_router_dtype", (None, "fp32"), "router logits are fp32"),
    Rule("moe_router_fusion", OFF, "a fused router kernel has its own order"),
    Rule("moe_permute_fusion", OFF, "our dispatchers move rows themselves"),
    Rule("moe_router_padding_for_quantization", OFF, "it pads for quantized experts, which are not supported"),
    Rule("moe_enable_routing_replay", OFF, "both sides choose the same experts already"),
    Rule("moe_expert_capacity_factor", (None,), _DROPS),
    Rule("moe_pad_expert_input_to_capacity", OFF, _DROPS),
    Rule("moe_token_dropping", OFF, _DROPS),
    Rule("moe_token_dispatcher_type", ("alltoall", "allgather"), "no other dispatcher has an ordered form"),
    Rule("moe_enable_deepep", OFF, "DeepEP adds in an order of its own"),
    Rule("moe_apply_probs_on_input", OFF, "probabilities weight the expert's output in the contract"),
    Rule("moe_latent_size", (None,), "latent projections are not in the contract"),
    Rule("moe_use_legacy_grouped_gemm", OFF, "the legacy module's weights are transposed and fused"),
    Rule("moe_shared_expert_overlap", OFF, "shared experts inside the dispatcher are not supported"),
    Rule("overlap_moe_expert_parallel_comm", OFF, "that schedule calls stock's steps directly"),
    Rule("delay_wgrad_compute", OFF, "weight gradients are never delayed"),
    Rule("add_bias_linear", OFF, "biases are not supported"),
    Rule("gated_linear_unit", (True,), _PLAIN),
    Rule("activation_func", (F.silu,), _PLAIN),
    Rule("activation_func_clamp_value", (None,), _PLAIN),
    Rule("glu_linear_offset", (0.0,), _PLAIN),
)


def moe_refusals(config: TransformerConfig) -> list[Finding]:
    """What is found of each option of ``config`` that an expert layer cannot obey."""
    found = [*broken(MOE_RULES, config), *balancing(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.calculate_per_token_loss)]
    if config.moe_shared_expert_intermediate_size is not None:
        found += broken((Rule("moe_shared_expert_gate", OFF, "gated shared experts are not in the contract"),), config)
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or []):
        found.append(Finding("the activation is recomputed already", "'moe' would work", "recompute_modules", "moe_act"))
    return found


def balancing(kind: Any, weight: Any, per_token_loss: bool) -> list[Finding]:
    """Of the balancing: the sequence-wise loss alone is in the contract, and its scale is that of losses summed over tokens.

    Args:
        kind: ``moe_router_load_balancing_type``, one or a list.
        weight: ``moe_aux_loss_coeff``, a number for each of them.
        per_token_loss: ``calculate_per_token_loss``.
    """
    kinds, weights = _each(kind), _each(weight)
    name, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    if "sinkhorn" in kinds:
        return [Finding("routing by sinkhorn depends on the whole batch", "'seq_aux_loss' or 'none' would work", name, kind)]
    if len(weights) != len(kinds):
        return [Finding(f"it must be one number for each of {kinds}", "0.0 for each would work", coefficient, weight)]
    used = {one: number for one, number in zip(kinds, weights, strict=True) if one != "none" and number}
    other = sorted(set(used) - {"seq_aux_loss"})
    if other:
        why = f"the value of {other[0]} depends on the micro-batch" if other[0] == "aux_loss" else f"{other[0]} is not in the contract"
        return [Finding(why, f"'seq_aux_loss', or {coefficient}=0.0 for it, would work", name, kind)]
    if any(not 0.0 < number < float("inf") for number in used.values()):
        return [Finding("it must be a positive number", "0.01 or 0.0 would work", coefficient, weight)]
    if used and not per_token_loss:
        why = "with calculate_per_token_loss=False its share depends on the micro-batches"
        return [Finding(why, "calculate_per_token_loss=True would work", coefficient, weight)]
    return []


def has_balance_loss(config: TransformerConfig) -> bool:
    """Whether a model that was not refused has the sequence-wise auxiliary loss."""
    return bool(config.num_moe_experts) and "seq_aux_loss" in _each(config.moe_router_load_balancing_type) and any(_each(config.moe_aux_loss_coeff))


def balance_coefficient(config: TransformerConfig) -> float:
    """The coefficient of the sequence-wise auxiliary loss of a model that was not refused; 0 where it has none."""
    if not has_balance_loss(config):
        return 0.0
    pairs = zip(_each(config.moe_router_load_balancing_type), _each(config.moe_aux_loss_coeff), strict=True)
    return next(float(weight) for kind, weight in pairs if kind == "seq_aux_loss")


def refuse_moe(config: TransformerConfig) -> None:
    """Refuse a config whose expert layers cannot obey the contract.

    Raises:
        ValueError: lists every option that would have to change.
    """
    refuse("expert layers cannot obey the contract with these options", moe_refusals(config))


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
