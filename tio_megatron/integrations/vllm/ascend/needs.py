"""Every symbol of vllm-ascend 0.23 that this package relies on, and what it relies on. Data only.

``make test-vllm-ascend VLLM_ASCEND=DIR`` reads the sources and checks each; a snapshot of names and signatures (facts, no code) is kept in
``tests/golden/vllm_ascend.json``, and CI compares the needs with that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """One symbol.

    Args:
        symbol: ``module:name`` or ``module:Class.method``.
        why: what hangs on it.
        parameters: of a function: it must have these names, in this order, first.
        bases: of a class: it must have these bases, by their last name.
        attributes: of a class: these are fields of it, or set on ``self`` by its ``__init__``.
        lacks: of a class: methods that it must not have, since a patch of ours is on its base.
        calls: of a method: it must call these methods of ``self``.
    """

    symbol: str
    why: str
    parameters: tuple[str, ...] | None = None
    bases: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


_ATTENTION = "vllm_ascend.attention.attention_v1"

NEEDS: tuple[Need, ...] = (
    Need("vllm_ascend:register", "the platform plug-in", ()),
    Need("vllm_ascend.platform:NPUPlatform", "recognised by its device_type", bases=("Platform",), attributes=("device_type",)),
    Need("vllm_ascend.utils:register_ascend_customop", "registers vllm-ascend's layers, once, when a worker is built", ("vllm_config",)),
    Need("vllm_ascend.worker.worker:NPUWorker", "base of our worker", bases=("WorkerBase",)),
    Need("vllm_ascend.worker.worker:NPUWorker.__init__", "called by ours", ("self", "vllm_config", "local_rank", "rank", "distributed_init_method")),
    Need("vllm_ascend.worker.worker:NPUWorker.init_device", "builds the model runner", ("self",)),
    Need("vllm_ascend.worker.worker:NPUWorker.load_model", "builds the model, when our scope holds", ("self",), calls=("model_runner",)),
    Need("vllm_ascend.worker.model_runner_v1:NPUModelRunner", "our patches of its base", bases=("GPUModelRunner",)),
    Need("vllm_ascend.worker.model_runner_v1:NPUModelRunner._allocate_kv_cache_tensors", "wrapped", ("self", "kv_cache_config")),
    Need(
        "vllm_ascend.worker.model_runner_v1:NPUModelRunner.initialize_kv_cache_tensors",
        "where the pages come from",
        ("self", "kv_cache_config"),
        calls=("_allocate_kv_cache_tensors", "_reshape_kv_cache_tensors"),
    ),
    Need("vllm_ascend.worker.model_runner_v1:NPUModelRunner._bookkeeping_sync", "its own, so ours is left out", ("self", "scheduler_output", "sampler_output")),
    Need(
        "vllm_ascend.sample.sampler:AscendSampler",
        "gives log-probabilities by its base, which we patch",
        bases=("Sampler",),
        lacks=("compute_logprobs", "sample", "forward", "gather_logprobs"),
    ),
    Need(f"{_ATTENTION}:AscendAttentionBackend", "base of our backend", bases=("AttentionBackend",), lacks=("forward_includes_kv_cache_update",)),
    Need(f"{_ATTENTION}:AscendAttentionBackend.get_impl_cls", "overridden", ()),
    Need(f"{_ATTENTION}:AscendAttentionBackend.get_builder_cls", "overridden", ()),
    Need(f"{_ATTENTION}:AscendAttentionBackend.get_kv_cache_shape", "keys and values", ("num_blocks", "block_size", "num_kv_heads", "head_size")),
    Need(f"{_ATTENTION}:AscendAttentionBackend.get_supported_kernel_block_sizes", "pages of 128 keys", ()),
    Need(f"{_ATTENTION}:AscendAttentionMetadataBuilder", "base of our builder", bases=("AttentionMetadataBuilder",)),
    Need(f"{_ATTENTION}:AscendAttentionMetadataBuilder.__init__", "called by ours", ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")),
    Need(f"{_ATTENTION}:AscendAttentionMetadataBuilder.build", "overridden", ("self", "common_prefix_len", "common_attn_metadata", "fast_build")),
    Need(f"{_ATTENTION}:AscendMetadata", "what a step is", attributes=("num_actual_tokens", "seq_lens_cpu", "slot_mapping", "block_tables", "causal")),
    Need(
        f"{_ATTENTION}:AscendAttentionBackendImpl",
        "base of our attention",
        bases=("AttentionImpl",),
        attributes=(
            "scale",
            "attn_type",
            "sliding_window",
            "alibi_slopes",
            "sinks",
            "enable_c8_quant",
            "enable_hamming_sparse",
            "kv_sharing_target_layer_name",
        ),
    ),
    Need(
        f"{_ATTENTION}:AscendAttentionBackendImpl.forward",
        "overridden",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"),
    ),
    Need("vllm_ascend.attention.utils:AscendCommonAttentionMetadata", "a batch", bases=("CommonAttentionMetadata",), attributes=("seq_lens_cpu",)),
    Need("vllm_ascend.ascend_config:AscendConfig.__init__", "reads additional_config", ("self", "vllm_config")),
)

VLLM: tuple[Need, ...] = (
    Need("vllm.model_executor.custom_op:op_registry_oot", "where layers are replaced"),
    Need("vllm.v1.attention.backend:CommonAttentionMetadata", "a batch", attributes=("query_start_loc_cpu", "num_reqs", "num_actual_tokens", "causal")),
    Need("vllm.model_executor.layers.fused_moe.layer:FusedMoE", "base of our experts", bases=("PluggableLayer",), attributes=("moe_config", "top_k")),
    Need("vllm.model_executor.layers.fused_moe.layer:FusedMoE._replace_quant_method", "ours is put in after", ("self", "mk")),
    Need("vllm.model_executor.layers.fused_moe.layer:FusedMoE.__init__", "called by ours", ("self", "num_experts", "top_k")),
    Need("vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.__init__", "base of our method", ("self", "moe")),
    Need(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply_monolithic",
        "overridden",
        ("self", "layer", "x", "router_logits", "input_ids"),
    ),
    Need("vllm.model_executor.layers.fused_moe.expert_map_manager:determine_expert_map", "who owns which expert", ("ep_size", "ep_rank", "global_num_experts")),
    Need("vllm.model_executor.layers.logits_processor:LogitsProcessor._get_logits", "applies the head's method", ("self", "hidden_states", "lm_head")),
    Need("vllm.v1.sample.sampler:Sampler.compute_logprobs", "patched", ("logits",)),
    Need("vllm.v1.sample.sampler:Sampler.__init__", "patched", ("self", "logprobs_mode")),
    Need("vllm.v1.sample.sampler:Sampler.sample", "patched", ("self", "logits", "sampling_metadata")),
    Need("vllm.v1.sample.sampler:Sampler.forward", "patched", ("self", "logits", "sampling_metadata")),
    Need("vllm.v1.engine.core:EngineCore.collective_rpc", "patched", ("self", "method", "timeout", "args", "kwargs")),
    Need("vllm.v1.engine.core:EngineCore.step", "patched", ("self",)),
    Need("vllm.engine.arg_utils:EngineArgs.create_engine_config", "patched", ("self",)),
    Need("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "patched", ("self", "engine_core_outputs")),
)
"""The same of vLLM 0.23.0, where it is older than the release that the CPU is served by."""

ABSENT_IN_VLLM = {
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": "moe.py, for vLLM 0.32; ascend/experts.py takes FusedMoE",
}
"""Names of vLLM that other files of this package import and vLLM 0.23 has not, and why that does not matter on an NPU."""
