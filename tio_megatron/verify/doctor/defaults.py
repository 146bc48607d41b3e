"""What a setting is when nobody writes it: tables of the defaults that move a number, each with the release it was read from.

Names are those of megatron-core's configs where an argument sets one (:data:`MEGATRON_NAMES`). Tests hold the tables against the packages: vLLM's and
megatron-core's against those installed, Megatron-LM's against a checkout that ``MEGATRON_LM`` names, verl's against one that ``VERL`` names.
"""

from __future__ import annotations

from typing import Any

MEGATRON_LM = "Megatron-LM core_v0.16.1"
MEGATRON_CORE = "megatron-core 0.16.1"
VLLM = "vLLM 0.32.0"
VERL = "verl 0.9.1"

MEGATRON_NAMES: dict[str, str] = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "rope_fusion": "apply_rope_fusion",
    "bias_linear": "add_bias_linear",
    "overlap_p2p_communication": "overlap_p2p_comm",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
}
"""Megatron-LM's arguments whose name is not that of the field they set."""

SHARED: dict[str, Any] = {
    # What a token's probability is a function of.
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "kv_channels": None,
    "ffn_hidden_size": None,
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "apply_query_key_layer_scaling": False,
    # Experts.
    "num_moe_experts": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_expert_capacity_factor": None,
    # How it is computed.
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    # How it is trained.
    "calculate_per_token_loss": False,
    # How it is cut.
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
}
"""The same in Megatron-LM's arguments and in megatron-core's ``TransformerConfig``, most of whose fields the arguments set."""

MEGATRON_ARGUMENTS: dict[str, Any] = SHARED | {
    # What a token's probability is a function of.
    "position_embedding_type": "learned_absolute",
    "use_rotary_position_embeddings": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "seq_len_interpolation_factor": None,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "group_query_attention": False,
    "num_query_groups": 1,
    "moe_ffn_hidden_size": None,
    "untie_embeddings_and_output_weights": False,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "multi_latent_attention": False,
    "attention_softmax_in_fp32": False,
    "mtp_num_layers": None,
    # Experts.
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_pad_expert_input_to_capacity": False,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_apply_probs_on_input": False,
    "moe_enable_deepep": False,
    # How it is computed.
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "masked_softmax_fusion": True,
    "bias_swiglu_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": True,
    "deterministic_mode": False,
    "batch_invariant_mode": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    # How it is trained.
    "optimizer": "adam",
    "loss_scale": None,
    "grad_reduce_in_fp32": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "data_parallel_sharding_strategy": "no_shard",
    "use_megatron_fsdp": False,
    "average_in_collective": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    # How it is cut.
    "expert_tensor_parallel_size": None,
}
"""Of Megatron-LM's ``arguments.py``, before its ``validate_args`` (:func:`.running.megatron_lm` does what that does)."""

FROM_CHECKPOINT = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels position_embedding_type "
    "use_rotary_position_embeddings rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu gated_linear_unit "
    "untie_embeddings_and_output_weights layernorm_zero_centered_gamma normalization apply_query_key_layer_scaling attention_dropout hidden_dropout "
    "hybrid_override_pattern spec hybrid_attention_ratio hybrid_mlp_ratio num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk "
    "moe_router_pre_softmax moe_shared_expert_intermediate_size moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor "
    "is_hybrid_model heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json moe_latent_size".split()
)
"""What Megatron-LM's ``--use-checkpoint-args`` takes from the checkpoint's arguments (``load_args_from_checkpoint``); all others keep their defaults."""

TRANSFORMER_CONFIG: dict[str, Any] = SHARED | {
    "gated_linear_unit": False,
    "num_query_groups": None,
    "attention_softmax_in_fp32": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Of megatron-core's ``TransformerConfig``: what a YAML file of Megatron-LM (``--yaml-cfg``) leaves out."""

VERL_TRAINER: dict[str, Any] = {
    "strategy": "megatron",
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_grouped_gemm": True,
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": False,
    "attention_backend": "flash",
    "dtype": "bfloat16",
    "calculate_per_token_loss": False,
    "optimizer": "adam",
    "use_distributed_optimizer": True,
    "use_dynamic_bsz": False,
    "use_remove_padding": True,
    "use_mbridge": True,
    "grad_reduce_in_fp32": True,
    "param_offload": False,
    "grad_offload": False,
    "optimizer_offload": False,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "nnodes": 1,
    "n_gpus_per_node": 8,
}
"""Of verl's Megatron actor: its YAML, and what it makes of an HF model for a ``TransformerConfig``. Sizes, epsilon and rotary base are the model's."""

VERL_ROLLOUT: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": -1,
    "top_p": 1,
    "dtype": "bfloat16",
    "tensor_model_parallel_size": 2,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "enforce_eager": False,
    "free_cache_engine": True,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "logprobs_mode": "processed_logprobs",
    "calculate_log_probs": True,
    "load_format": "dummy",
    "quantization": None,
}
"""Of verl's ``rollout.yaml``."""

VLLM_ENGINE: dict[str, Any] = {
    "dtype": "auto",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "block_size": None,
    "enable_prefix_caching": None,
    "enable_chunked_prefill": None,
    "disable_cascade_attn": None,
    "logprobs_mode": "raw_logprobs",
    "generation_config": "auto",
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enforce_eager": False,
    "attention_backend": None,
    "async_scheduling": None,
    "seed": 0,
    "load_format": "auto",
    "enable_lora": False,
    "speculative_config": None,
    "enable_eplb": False,
    "enable_dbo": False,
    "enable_prompt_embeds": False,
    "kv_transfer_config": None,
    "expert_placement_strategy": "linear",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False,
}
"""Of vLLM's ``EngineArgs``; None is decided when the engine starts (:data:`VLLM_DECIDES`)."""

VLLM_DECIDES: dict[str, Any] = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "disable_cascade_attn": True}
"""What vLLM makes of None for a decoder that generates."""
