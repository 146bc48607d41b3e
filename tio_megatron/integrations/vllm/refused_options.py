"""vLLM's options that are refused wherever an engine runs: the rows that its start (:mod:`.refusals`) and the doctor before it read. torch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tio_megatron.contract.families import FAMILIES
from tio_megatron.findings.finding import OFF, Finding, Rule, broken

BLOCK: int = FAMILIES["cpu"].fields["kv_block"]
"""Keys in one block of the attention walk; a page holds whole blocks."""
_NOTHING: tuple[Any, ...] = (None, False, "", "null", "none", "None", {}, "{}")
_LEFT_OUT = "leave it out"

RULES = (
    Rule("quantization", _NOTHING, "quantized products have no fixed order", "use an unquantized checkpoint"),
    Rule("enable_lora", OFF, "adapters are not covered", "merge the adapter into the checkpoint"),
    Rule("speculative_config", _NOTHING, "speculative decoding is not covered", _LEFT_OUT),
    Rule("spec_method", _NOTHING, "speculative decoding is not covered", _LEFT_OUT),
    Rule("spec_model", _NOTHING, "speculative decoding is not covered", _LEFT_OUT),
    Rule("spec_tokens", (*_NOTHING, 0), "speculative decoding is not covered", _LEFT_OUT),
    Rule("trust_remote_code", OFF, "no code of a checkpoint is run here", _LEFT_OUT),
    Rule("enable_prompt_embeds", OFF, "prompts are token ids", "give token ids"),
    Rule("enable_return_routed_experts", OFF, "our layers do not hand out which experts were chosen", _LEFT_OUT),
    Rule("kv_transfer_config", _NOTHING, "keys and values from elsewhere are not covered", _LEFT_OUT),
    Rule("enable_eplb", OFF, "expert load balancing moves experts between ranks", _LEFT_OUT),
    Rule("enable_dbo", OFF, "dual batch overlap is not covered", _LEFT_OUT),
    Rule("expert_placement_strategy", ("linear",), "experts must be dealt out in runs", "use linear"),
    Rule("pipeline_parallel_size", (1, None), "pipeline parallelism is not covered", "use 1"),
    Rule("data_parallel_size", (1, None), "data parallelism inside one engine is not covered", "use 1; start one engine per replica"),
    Rule("decode_context_parallel_size", (1, None), "decode context parallelism is not covered", "use 1"),
    Rule("prefill_context_parallel_size", (1, None), "prefill context parallelism is not covered", "use 1"),
    Rule("dtype", ("bfloat16", "float32"), "no other element type has kernels", "use bfloat16 or float32, the trainer's"),
    Rule("load_format", ("auto", "hf", "safetensors", "pt", "dummy"), "its weights come past the loader", "use one of auto, hf, safetensors, pt, dummy"),
    Rule("disable_cascade_attn", (True, None), "cascade attention merges two partial softmaxes where requests share a prefix", "leave it as it is (True)"),
)
"""Names are those of vLLM's arguments."""

UNJUDGED: dict[str, str] = {
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
"""Options that may change a log-probability and that no row judges: what they do. All others of the release are names, memory, time and logs."""


def problems(asked: Mapping[str, Any]) -> list[Finding]:
    """What is found of an engine's options.

    Args:
        asked: by the names of vLLM's arguments; ``dtype``: what the engine computes in, without ``torch.``; ``block_size``: None where nobody asked for
            a size (the platform's comes later); ``positions``: of the model, where they are known, beside a ``max_model_len``.
    """
    found = broken(RULES, asked)
    kept, computed = asked.get("kv_cache_dtype", "auto"), asked.get("dtype")
    if kept not in ("auto", computed):
        found.append(Finding(f"keys and values of {computed} would be kept in another type", "use auto", "kv_cache_dtype", kept))
    if (block := asked.get("block_size")) is not None and block % BLOCK:
        found.append(Finding("a page must hold whole blocks of keys", f"use a multiple of {BLOCK}", "block_size", block))
    longest, positions = asked.get("max_model_len"), asked.get("positions")
    if longest is not None and positions is not None and longest > positions:
        found.append(Finding(f"the model has {positions} positions", f"at most {positions} would work", "max_model_len", longest))
    return found
