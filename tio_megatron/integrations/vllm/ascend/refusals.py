"""What vllm-ascend 0.23 may not be asked for under a contract: each option by its name, with the reason and what works."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tio_megatron.findings.finding import Finding

OFF = (False, None, 0)

OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "weight_nz_mode": ((0,), "weights in the NZ format are cut into other tiles"),
    "enable_matmul_allreduce": (OFF, "the fused product and all-reduce sums in the vendor's order"),
    "enable_fused_mc2": (OFF, "the fused dispatch, product and combine sums in the vendor's order"),
    "enable_prefill_mc2": (OFF, "its combine sums in the vendor's order"),
    "enable_mc2_hierarchy_comm": (OFF, "its combine sums in the vendor's order"),
    "enable_flashcomm1": (OFF, "it scatters the residual over ranks between layers, where ours hold it whole"),
    "enable_flashcomm2_parallel_size": (OFF, "it cuts the output projection in groups of its own"),
    "finegrained_tp_config": ((None, {}), "layers cut in groups of their own do not fall on leaves"),
    "layer_sharding": ((None, []), "layers shared out over ranks are loaded behind ours"),
    "xlite_graph_config": ((None, {}, {"enabled": False}), "it runs a model of its own"),
    "weight_prefetch_config": ((None, {}, {"enabled": False}), "it reaches for weights that ours have packed"),
    "eplb_config": ((None, {}), "experts that move change owners"),
    "mix_placement": (OFF, "experts must be dealt out in runs"),
    "enable_shared_expert_dp": (OFF, "it scatters the residual over ranks between layers"),
    "multistream_overlap_shared_expert": (OFF, "it runs inside vllm-ascend's expert layer"),
    "multistream_overlap_gate": (OFF, "it runs inside vllm-ascend's expert layer"),
    "enable_async_exponential": (OFF, "its draws are made before the request is known"),
    "enable_reduce_sample": (OFF, "logits stay cut over ranks, and whole rows are needed"),
    "pa_shape_list": ((None, []), "it takes another attention operator for some batch sizes"),
    "hamming_sparse": ((None, {}, {"enabled": False, "sparse_json_location": ""}), "it leaves keys out"),
    "enable_kv_nz": (OFF, "keys in the NZ format are cut into other tiles"),
    "enable_sparse_sfa_c8": (OFF, "keys are not quantized"),
    "enable_sparse_li_c8": (OFF, "keys are not quantized"),
    "c8_enable_reshape_optim": (OFF, "keys are not quantized"),
    "enable_balance_scheduling": (OFF, "it needs data parallelism inside one engine"),
    "recompute_scheduler_enable": (OFF, "it needs keys moved between engines"),
    "SLO_limits_for_dynamic_batch": ((None, -1), "another scheduler than the one that answers refused requests"),
    "profiling_chunk_config": ((None, {}, {"enabled": False}), "another scheduler than the one that answers refused requests"),
    "rejection_sampler_config": ((None, {}), "speculative decoding is not covered"),
    "dump_config_path": ((None,), "it hooks into layers"),
    "dump_config": ((None,), "it hooks into layers"),
}
"""Keys of ``additional_config`` that vllm-ascend reads, the values that are taken, and why no other."""

HARMLESS = (
    "ascend_compilation_config",
    "ascend_fusion_config",
    "ascend_log_path",
    "dp_allreduce_on_npu",
    "enable_cpu_binding",
    "enable_mlapo",
    "enable_sleep_mode_extra_cleanup",
    "enable_transpose_kv_cache_by_block",
    "mega_moe_max_tokens",
    "msmonitor_use_daemon",
    "multistream_dsv4_dsa_overlap",
    "refresh",
)
"""Keys that no sum of a model of ours depends on. Those of compilation and fusion are read in graph modes alone, which are refused."""

ENVIRONMENT: dict[str, tuple[str, str]] = {
    "VLLM_ASCEND_ENABLE_NZ": ("0", "weights in the NZ format are cut into other tiles; vllm-ascend's default is 1"),
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": ("0", "the fused product and all-reduce sums in the vendor's order"),
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": ("0", "it scatters the residual over ranks between layers, where ours hold it whole"),
    "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": ("0", "it cuts the output projection in groups of its own"),
    "VLLM_ASCEND_ENABLE_FUSED_MC2": ("0", "the fused dispatch, product and combine sums in the vendor's order"),
    "VLLM_ASCEND_BALANCE_SCHEDULING": ("0", "it needs data parallelism inside one engine"),
    "DYNAMIC_EPLB": ("false", "experts that move change owners"),
}
"""Variables that vllm-ascend reads, the value that is taken, and why no other. Where a key of ``additional_config`` has the same meaning, it wins."""

HARMLESS_ENVIRONMENT = (
    "MAX_JOBS",
    "CMAKE_BUILD_TYPE",
    "COMPILE_CUSTOM_KERNELS",
    "CXX_COMPILER",
    "C_COMPILER",
    "SOC_VERSION",
    "VERBOSE",
    "ASCEND_HOME_PATH",
    "HCCL_SO_PATH",
    "VLLM_VERSION",
    "MSMONITOR_USE_DAEMON",
    "VLLM_ASCEND_ENABLE_MLAPO",
    "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK",
    "VLLM_ASCEND_ENABLE_BATCH_MEMCPY",
)
"""Building, tools, latent attention, copies of keys between engines."""

DEFAULTS_THAT_ARE_REFUSED = {"VLLM_ASCEND_ENABLE_NZ": "weight_nz_mode"}
"""Variables that must be set because vllm-ascend's own default is refused, and the key that does the same."""

PAGE = 128
"""Keys in a page: the block size that the paged operator is documented for, and the only one that vllm-ascend's backend offers."""


@dataclass(frozen=True)
class Asked:
    """What an engine is asked for, as far as the platform refuses it: of a started engine's configuration, or of arguments before there is one.

    Args:
        enforce_eager: no graphs.
        graphs: whether a mode of graphs is named beside that.
        dtype: without ``torch.``.
        block_size: keys in a page; None where nobody asked for a size.
        logprobs_mode: by its value.
        weight_transfer: whether vLLM is to receive weights.
        async_scheduling: as it will be; vLLM takes it where nobody says otherwise.
        sleep: whether the engine is to be put to sleep.
    """

    enforce_eager: bool
    graphs: bool
    dtype: str
    block_size: int | None
    logprobs_mode: str
    weight_transfer: bool
    async_scheduling: bool
    sleep: bool


def problems(config: Any, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What is found of every option that is not covered, beside those that hold on every platform.

    Args:
        config: of the engine (``VllmConfig``).
        environment: the process's.
    """
    given = dict(config.additional_config or {})
    yield from of_additional(given)
    yield from of_environment(environment, given)
    yield from _engine(config)


def of_additional(given: Mapping[str, Any]) -> Iterator[Finding]:
    """What is found of every key of ``additional_config`` that is not covered."""
    for key, (works, why) in OPTIONS.items():
        if key in given and not any(given[key] == value and type(given[key]) is not bool or given[key] is value for value in works):
            yield Finding(why, f"{' or '.join(map(repr, works))} would work", f"additional_config[{key!r}]", given[key])


def of_environment(environment: Mapping[str, str], given: Mapping[str, Any]) -> Iterator[Finding]:
    """What is found of every variable that is not covered, beside the ``additional_config`` that is given."""
    for name, (works, why) in ENVIRONMENT.items():
        covered = DEFAULTS_THAT_ARE_REFUSED.get(name)
        if covered is not None and given.get(covered) in OPTIONS[covered][0]:
            continue
        value = environment.get(name, works if covered is None else None)
        if value != works:
            yield Finding(why, f"set {name}={works}", name, value, topic="environment")


def _engine(config: Any) -> Iterator[Finding]:
    model, cache, mode = config.model_config, config.cache_config, config.compilation_config.cudagraph_mode
    asked = Asked(
        enforce_eager=bool(model.enforce_eager),
        graphs=mode is not None and mode.name != "NONE",
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=cache.block_size if cache.user_specified_block_size else None,
        logprobs_mode=model.logprobs_mode.rpartition(".")[2],
        weight_transfer=config.weight_transfer_config is not None,
        async_scheduling=bool(config.scheduler_config.async_scheduling),
        sleep=bool(model.enable_sleep_mode),
    )
    yield from of_engine(asked)


def of_engine(asked: Asked) -> Iterator[Finding]:
    """What is found of every option of the engine itself that is not covered."""
    if not asked.enforce_eager or asked.graphs:
        why = "a captured graph replays vllm-ascend's attention parameters"
        yield Finding(why, "use enforce_eager=True", "graphs (cudagraph_mode, enforce_eager=False)")
    if asked.dtype != "bfloat16":
        yield Finding("the NPU family takes bfloat16", "use bfloat16", "dtype", asked.dtype)
    if asked.block_size not in (None, PAGE):
        yield Finding("the paged operator's pages", f"use {PAGE}", "block_size", asked.block_size)
    if asked.logprobs_mode != "raw_logprobs":
        yield Finding("vllm-ascend's sampler gives no others than raw_logprobs", "use raw_logprobs", "logprobs_mode", asked.logprobs_mode)
    if asked.weight_transfer:
        why = "vLLM 0.23 moves weights layer by layer past ours"
        yield Finding(why, "load a file with collective_rpc('tio_load', args=(path,))", "weight_transfer_config")
    if asked.async_scheduling:
        yield Finding("lengths of the next step are then on the device", "use async_scheduling=False", "async_scheduling", True)
    if asked.sleep:
        yield Finding("packed weights are not in vllm-ascend's pool", "leave it out", "enable_sleep_mode", True)
