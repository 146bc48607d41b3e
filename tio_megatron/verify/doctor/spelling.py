"""How a setting of the trainer's is written where it will be read: Megatron-LM's command line, verl's overrides, megatron-core's own names."""

from __future__ import annotations

from typing import Any

from tio_megatron.verify.doctor.running import Kind

FLAGS = {
    "hidden_dropout": "--hidden-dropout 0",
    "attention_dropout": "--attention-dropout 0",
    "normalization": "--normalization RMSNorm",
    "add_bias_linear": "--disable-bias-linear",
    "gated_linear_unit": "--swiglu",
    "position_embedding_type": "--position-embedding-type rope (or --use-rotary-position-embeddings)",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "apply_rope_fusion": "--no-rope-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "deterministic_mode": "--deterministic-mode",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
}
"""What to write on Megatron-LM's command line for the one value that the contract takes."""
NAMES = {"layernorm_epsilon": "--norm-epsilon", "num_moe_experts": "--num-experts", "num_query_groups": "--group-query-attention --num-query-groups"}
"""Its arguments that have another name than megatron-core's field."""
OVERRIDES = "actor_rollout_ref.actor.megatron.override_transformer_config"
"""Where verl takes fields of megatron-core's ``TransformerConfig``."""
DDP_OVERRIDES = "actor_rollout_ref.actor.megatron.override_ddp_config"
OPTIMIZER_OVERRIDES = "actor_rollout_ref.actor.optim.override_optimizer_config"


def written(kind: Kind, option: str, value: Any, place: str = OVERRIDES) -> str:
    """``option`` (megatron-core's name) with ``value``, ready to be copied; ``place``: where verl takes it.

    >>> written("verl", "apply_rope_fusion", False)
    '++actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False'
    >>> written("megatron-lm", "apply_rope_fusion", False), written("megatron-lm", "num_moe_experts", 8), written("megatron-lm", "qk_layernorm", False)
    ('--no-rope-fusion', '--num-experts 8', 'leave --qk-layernorm out')
    >>> written("transformer-config", "moe_router_dtype", "fp32")
    "moe_router_dtype='fp32'"
    """
    if kind == "verl":
        return f"++{place}.{option}={'null' if value is None else number(value)}"  # ++ lays over what is there and what is not
    if kind != "megatron-lm":
        return f"{option}={value!r}"
    if option in FLAGS:
        return FLAGS[option]
    flag = NAMES.get(option, "--" + option.replace("_", "-"))
    if value is False or value is None:
        return f"leave {flag} out"
    return flag if value is True else f"{flag} {number(value)}"


def number(value: object) -> str:
    """A whole number without its point.

    >>> number(1e6), number(1e-6), number("all")
    ('1000000', '1e-06', 'all')
    """
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)
