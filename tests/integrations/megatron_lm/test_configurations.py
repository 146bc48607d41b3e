"""Configurations as dictionaries: what verl makes of a model and of ``override_transformer_config``."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron.applied import refusals

BASE = dict(
    num_layers=2,
    hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=32,
    ffn_hidden_size=256,
    num_moe_experts=8,
    moe_ffn_hidden_size=64,
    moe_router_topk=4,
    moe_router_load_balancing_type="none",
    moe_grouped_gemm=True,
    qk_layernorm=True,
    normalization="RMSNorm",
    layernorm_epsilon=1e-6,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    masked_softmax_fusion=True,
    persist_layer_norm=True,
    bias_activation_fusion=True,
    bias_dropout_fusion=True,
    deallocate_pipeline_outputs=True,
    variable_seq_lengths=True,
    moe_token_dispatcher_type="alltoall",
)
"""By a dictionary of this kind verl builds the configuration of a Qwen3-MoE."""

PASS = [
    {"moe_router_dtype": "fp32"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"attention_softmax_in_fp32": True},
    {"calculate_per_token_loss": True, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001},
]
REFUSED = [
    {"moe_permute_fusion": True},
    {"apply_rope_fusion": True},
    {"moe_enable_deepep": True},
    {"moe_token_dispatcher_type": "flex"},
    {"moe_shared_expert_overlap": True},
    {"attention_dropout": 0.1},
    {"cross_entropy_loss_fusion": True},
    {"mtp_num_layers": 1},
]


def check(overrides):
    config = TransformerConfig(**BASE)
    for name, value in overrides.items():  # after stock's own checks, some of which would refuse first
        assert hasattr(config, name)
        setattr(config, name, value)
    refusals.check(config, {}, Contract(), 1000)


@pytest.mark.parametrize("overrides", PASS, ids=lambda overrides: next(iter(overrides)))
def test_overrides_that_change_no_number_pass(overrides):
    check(overrides)


@pytest.mark.parametrize("overrides", REFUSED, ids=lambda overrides: next(iter(overrides)))
def test_overrides_that_do_are_refused_by_name(overrides):
    name, value = next(iter(overrides.items()))
    with pytest.raises(ValueError, match=rf"this model cannot run under the contract:\n  {name}={value!r}: .* would work"):
        check(overrides)
