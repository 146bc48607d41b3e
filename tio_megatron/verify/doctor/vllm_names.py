"""The names of vLLM 0.32.0's options, as its command line spells them (``-`` as ``_``), by whether they may change a log-probability.

A test holds them against the installed vLLM's ``EngineArgs``; those of its server (``vllm serve``) are in ``SERVER``.
"""

from __future__ import annotations

JUDGED = frozenset(
    """
model hf_overrides override_generation_config load_format speculative_config spec_method spec_model spec_tokens temperature top_k top_p min_p
repetition_penalty presence_penalty frequency_penalty name max_model_len trust_remote_code enable_return_routed_experts
""".split()
)
"""Judged in :mod:`.options`, :mod:`.between` or :mod:`.sources`, beside those of :data:`.defaults.VLLM_ENGINE`. What a request says counts here too."""

DECIDING: dict[str, str] = {
    "hf_config_path": "another config.json than the model's is read",
    "config_format": "another configuration than config.json may be read",
    "convert": "the model is made into another kind",
    "runner": "the model may be run as another kind",
    "model_class_overrides": "another class computes the model",
    "model_impl": "another implementation may compute the model",
    "quantization_config": "products may be quantized",
    "kv_cache_dtype_skip_layers": "keys and values of some layers are of another type",
    "kv_sharing_fast_prefill": "a part of the layers is left out of a prompt",
    "revision": "another revision of the weights may be read",
    "model_weights": "weights come from elsewhere",
    "logits_processors": "logits are changed by code that was not looked at",
    "worker_cls": "another worker computes",
    "scheduler_cls": "another scheduler forms the batches",
    "additional_config": "settings of a platform's own",
    "watermark_config": "logits are changed",
    "diffusion_config": "tokens are generated in another way",
    "engram_config": "another memory takes part",
    "aux_output_config": "more is computed beside",
    "enable_hc_sp": "sums are cut in another way",
    "moe_backend": "another kernel computes the experts",
    "linear_backend": "another kernel computes the products",
    "sparse_indexer_topk_backend": "another kernel chooses keys",
    "all2all_backend": "another exchange adds the experts",
    "dcp_comm_backend": "another exchange merges softmaxes",
    "dcp_q_replicate": "queries are computed elsewhere",
    "compilation_config": "compiled graphs may fuse and round in another way",
    "attention_config": "another attention kernel may be chosen",
    "kernel_config": "other kernels may be chosen",
    "ir_op_priority": "other kernels may be chosen",
    "optimization_level": "compiled graphs may fuse and round in another way",
    "performance_mode": "other kernels may be chosen",
    "enable_flashinfer_autotune": "kernels are chosen by time",
    "enable_mm_embeds": "embeddings come from elsewhere",
    "ec_transfer_config": "embeddings come from elsewhere",
    "lora_modules": "adapters are not covered",
    "default_mm_loras": "adapters are not covered",
}
"""May change a log-probability, and are not judged: what they do."""

NEUTRAL = frozenset(
    """
return_sampling_mask served_model_name tokenizer skip_tokenizer_init tokenizer_mode
allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
cudagraph_capture_sizes max_cudagraph_capture_size distributed_executor_backend master_addr master_port nnodes node_rank
distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids dcp_kv_cache_interleave_size
cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend enable_batch_sharded_sampling
enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
disable_nccl_for_dp_synchronization eplb_config max_parallel_loading_workers prefix_caching_hash_algo prefix_cache_retention_interval
disable_sliding_window offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
gpu_memory_utilization device_memory_utilization kv_cache_memory_bytes max_num_scheduled_tokens long_prefill_token_threshold
long_prefill_token_threshold_adaptive max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs use_fp64_gumbel enable_trace_replay
disable_log_stats aggregate_engine_logging code_revision hf_token tokenizer_revision allow_deprecated_quantization disable_custom_all_reduce
enable_shm_tensor_arena language_model_only limit_mm_per_prompt interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
mm_device_do_normalize max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora
specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight num_gpu_blocks_override
model_loader_extra_config ignore_patterns disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
disable_hybrid_kv_cache_manager structured_outputs_config reasoning_parser reasoning_parser_plugin show_hidden_metrics_for_version
otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose
enable_mm_processor_stats scheduling_policy pooler_config mamba_config worker_extension_cls profiler_config logging_config log_level log_config_file
kv_events_config ec_manager_config reasoning_config enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names
enable_cumem_allocator enable_nccl_comm_suspend mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding
mamba_cache_philox_rounds use_tqdm_on_load pt_load_map_location stream_interval swa_bounded_replay fault_tolerance_config enable_fault_tolerance
kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout weight_transfer_config fail_on_environ_validation gdn_prefill_backend
kda_prefill_backend kda_decode_backend enable_log_requests disable_log_requests
""".split()
)
"""Names, memory, time, logs, and parts of models that are not covered."""

SHORT: dict[str, str] = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "q": "quantization",
    "O": "optimization_level",
    "cc": "compilation_config",
    "ac": "attention_config",
    "sc": "speculative_config",
    "dc": "diffusion_config",
    "n": "nnodes",
    "r": "node_rank",
    "dpn": "data_parallel_rank",
    "dpr": "data_parallel_start_rank",
    "dpl": "data_parallel_size_local",
    "dpa": "data_parallel_address",
    "dpp": "data_parallel_rpc_port",
    "dpb": "data_parallel_backend",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
}
"""Options with one dash, by what they are short for. ``-O3`` and ``-cc.mode=3`` are written without a space."""

SERVER = frozenset(
    """
host port uds uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints allow_credentials allowed_origins allowed_methods
allowed_headers api_key chat_template chat_template_content_format default_chat_template_kwargs trust_request_chat_template response_role ssl_keyfile
ssl_certfile ssl_ca_certs enable_ssl_refresh ssl_cert_reqs ssl_ciphers root_path middleware return_tokens_as_token_ids
disable_frontend_multiprocessing enable_request_id_headers enable_auto_tool_choice exclude_tools_when_tool_choice_none tool_call_parser
tool_parser_plugin tool_server max_log_len disable_fastapi_docs enable_prompt_tokens_details enable_server_load_tracking
enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs enable_log_deltas log_error_stack h11_max_incomplete_event_size
h11_max_header_count headless api_server_count config model_tag grpc
""".split()
)
"""Of ``vllm serve``."""
