"""A Megatron model from an HF configuration: stock classes, the fields that its architecture asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import Contract, Layout
from tio_megatron.integrations.megatron.training.shards import tag_shards
from tio_megatron.models import architecture_of


def transformer_config(config: CheckpointConfig, layout: Layout, **fields: Any) -> TransformerConfig:
    """The ``TransformerConfig`` of a checkpoint in a layout. ``fields`` are further Megatron fields, or replace those chosen here.

    Parameters are not initialised: a checkpoint is loaded, or ``perform_initialization=True`` is given.

    Raises:
        ValueError: Megatron refuses the combination.
    """
    shape = config.shape
    dtype = getattr(torch, config.dtype)
    chosen: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn or shape.moe_ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "sequence_parallel": layout.sp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "batch_p2p_comm": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if shape.experts:
        chosen |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.moe_ffn,
            "moe_router_topk": shape.top_k,
            # Softmax over the chosen logits is the renormalised softmax over all; without renormalising it must come first.
            "moe_router_pre_softmax": not config.normalise,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(**{**chosen, **architecture_of(shape).megatron, **fields})


def padded_vocab(config: CheckpointConfig, layout: Layout, contract: Contract | None = None) -> int:
    """The vocabulary size to give Megatron: the contract's padding, or (stock) whole blocks of 128 for each tensor-parallel rank."""
    if contract is not None:
        return contract.vocab_order(config.shape.vocab).padded
    block = 128 * layout.tp
    return -(-config.shape.vocab // block) * block


def gpt_model(config: CheckpointConfig, megatron: TransformerConfig, *, vocab_size: int, max_positions: int | None = None) -> GPTModel:
    """This rank's stage of the model, of stock classes, with parallel output; call :func:`weights.load_weights` next.

    Args:
        config: the checkpoint's configuration.
        megatron: what :func:`transformer_config` returned.
        vocab_size: padded vocabulary, see :func:`padded_vocab`.
        max_positions: longest sequence; the checkpoint's own limit when None.
    """
    grouped = megatron.moe_grouped_gemm
    spec = get_gpt_layer_local_spec(num_experts=megatron.num_moe_experts, moe_grouped_gemm=grouped, qk_layernorm=megatron.qk_layernorm, normalization="RMSNorm")
    model = GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=max_positions or config.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=config.shape.tied,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
    ).to(megatron.params_dtype)
    # Initialising would have done it. Stock's clipping counts an untagged shard of another rank as a copy, so a stock run would clip otherwise than
    # stock does, and differ between layouts for that reason alone.
    tag_shards(model)
    return model
