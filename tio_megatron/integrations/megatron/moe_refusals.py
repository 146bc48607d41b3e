"""Options of an expert layer that would change a sum, or which tokens an expert sees, and are therefore refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

_Rule = tuple[str, Callable[[Any], bool], str]


def _on(value: Any) -> bool:
    return bool(value)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _given(value: Any) -> bool:
    return value is not None


_RULES: tuple[_Rule, ...] = (
    ("moe_router_load_balancing_type", lambda v: "sinkhorn" in _each(v), "routing by sinkhorn depends on the whole batch; use 'none'"),
    ("moe_aux_loss_coeff", lambda v: any(_each(v)), "auxiliary losses are not in the contract yet; use 0.0"),
    ("moe_z_loss_coeff", _on, "the z-loss is not in the contract; use None"),
    ("moe_input_jitter_eps", _on, "noise on the router's input; use None"),
    ("moe_router_force_load_balancing", _on, "random routing; use False"),
    ("moe_router_num_groups", _on, "group-limited routing is not in the contract; use None"),
    ("moe_router_group_topk", _on, "group-limited routing is not in the contract; use None"),
    ("moe_router_score_function", lambda v: v != "softmax", "only 'softmax' is in the contract"),
    ("moe_router_topk_scaling_factor", lambda v: v is not None and v != 1.0, "scaled probabilities are not in the contract; use None"),
    ("moe_router_enable_expert_bias", _on, "a bias that follows the load depends on the batch; use False"),
    ("moe_router_dtype", lambda v: v not in (None, "fp32"), "router logits are fp32; use None or 'fp32'"),
    ("moe_router_fusion", _on, "a fused router kernel has its own order; use False"),
    ("moe_permute_fusion", _on, "our dispatchers move rows themselves; use False"),
    ("moe_router_padding_for_quantization", _on, "padded expert rows need quantized experts, which are not supported; use False"),
    ("moe_enable_routing_replay", _on, "both sides choose the same experts already; use False"),
    ("moe_expert_capacity_factor", _given, "tokens would be dropped; use None"),
    ("moe_pad_expert_input_to_capacity", _on, "tokens would be dropped; use False"),
    ("moe_token_dropping", _on, "tokens would be dropped; use False"),
    ("moe_token_dispatcher_type", lambda v: v not in ("alltoall", "allgather"), "use 'alltoall' or 'allgather'"),
    ("moe_enable_deepep", _on, "DeepEP adds in an order of its own; use False"),
    ("moe_apply_probs_on_input", _on, "probabilities weight the expert's output in the contract; use False"),
    ("moe_latent_size", _given, "latent projections are not in the contract; use None"),
    ("moe_use_legacy_grouped_gemm", _on, "the legacy module's weights are transposed and fused; use False"),
    ("moe_shared_expert_overlap", _on, "shared experts inside the dispatcher are not supported; use False"),
    ("moe_shared_expert_gate", _on, "gated shared experts are not in the contract; use False"),
    ("overlap_moe_expert_parallel_comm", _on, "that schedule calls stock's steps directly; use False"),
    ("delay_wgrad_compute", _on, "weight gradients are never delayed; use False"),
    ("add_bias_linear", _on, "biases are not in the contract; use False"),
    ("gated_linear_unit", lambda v: not v, "experts are SwiGLU; use True"),
    ("activation_func_clamp_value", _given, "experts are plain SwiGLU; use None"),
    ("glu_linear_offset", _on, "experts are plain SwiGLU; use 0.0"),
)


def moe_refusals(config: TransformerConfig) -> list[str]:
    """One line per option of ``config`` that an expert layer cannot obey, ``name=value: why; what works``."""
    found = []
    for name, refused, why in _RULES:
        value = getattr(config, name, None)
        if name == "moe_shared_expert_gate" and config.moe_shared_expert_intermediate_size is None:
            continue
        if refused(value):
            found.append(f"{name}={value!r}: {why}")
    if not _is_silu(config.activation_func):
        found.append(f"activation_func={getattr(config.activation_func, '__name__', config.activation_func)}: experts are SwiGLU; use torch.nn.functional.silu")
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or []):
        found.append("recompute_modules='moe_act': the activation is recomputed already; recompute 'moe' or leave it out")
    return found


def refuse_moe(config: TransformerConfig) -> None:
    """Refuse a config whose expert layers cannot obey the contract.

    Raises:
        ValueError: lists every option that would have to change.
    """
    found = moe_refusals(config)
    if found:
        raise ValueError("expert layers cannot obey the contract with these options:\n  " + "\n  ".join(found))


def _is_silu(function: Any) -> bool:
    return function is torch.nn.functional.silu or isinstance(function, torch.nn.SiLU) or getattr(function, "__name__", "") == "silu"
