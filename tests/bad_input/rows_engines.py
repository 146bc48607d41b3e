"""What apply() and the vLLM plug-in are asked for and do not do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

import tio_megatron as tio
from tests.bad_input.table import Row
from tio_megatron.contract import Contract, Cuts

APPLY, VLLM = "Megatron (apply)", "vLLM"
MODEL = dict(position_embedding_type="rope", rotary_percent=1.0, rope_scaling=False, seq_len_interpolation_factor=None, mtp_block_spec=None)
SIZES = dict(num_layers=2, hidden_size=128, num_attention_heads=8, num_query_groups=4, kv_channels=32, num_moe_experts=8, moe_ffn_hidden_size=64)
QWEN3 = dict(
    normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
    hidden_dropout=0.0, attention_dropout=0.0,
    moe_router_load_balancing_type="none",
)  # fmt: skip


def asks(contract: Contract | None = None, **fields: Any) -> Callable[[Path], Callable[[], object]]:
    """A model that asks for this. Changed after Megatron's own checks, some of which would refuse first."""

    def act(folder: Path) -> Callable[[], object]:
        from tio_megatron.integrations.megatron.applied import refusals

        config = TransformerConfig(**SIZES | QWEN3)
        for name, value in fields.items():
            setattr(config, name, value)
        return lambda: refusals.check(config, MODEL, contract or Contract(), 700)

    return act


def applied(*arguments: Any, **fields: Any) -> Callable[[Path], Callable[[], object]]:
    def run() -> None:
        try:
            tio.apply(*arguments, **fields)
        finally:
            tio.undo()

    return lambda folder: run


@cache
def engine() -> Any:
    """What stock vLLM makes of a start that is covered."""
    import tempfile

    from vllm import EngineArgs

    from tio_megatron.testing.qwen3 import MOE, write_tiny

    with tempfile.TemporaryDirectory(dir="/tmp") as held:
        folder = write_tiny(Path(held) / "m", MOE)
        return EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=512, enforce_eager=True).create_engine_config()


def started(path: str, value: Any, contract: Contract | None = None) -> Callable[[Path], Callable[[], object]]:
    """An engine with another value at ``path`` of its configuration."""

    def act(folder: Path) -> Callable[[], object]:
        from tio_megatron.integrations.vllm import refusals

        config = copy.deepcopy(engine())
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        object.__setattr__(owner, name, value)
        return lambda: refusals.check(config, contract or Contract())

    return act


def contract_of(value: Any, **options: Any) -> Callable[[Path], Callable[[], object]]:
    from tio_megatron.integrations.vllm import engine_options

    return lambda folder: lambda: engine_options(value, **options)


ROWS = [
    Row(APPLY, "dropout", "hidden_dropout=0.1", asks(hidden_dropout=0.1)),
    Row(APPLY, "a capacity factor", "moe_expert_capacity_factor=1.0: tokens would be dropped", asks(moe_expert_capacity_factor=1.0)),
    Row(APPLY, "FP8", "fp8='e4m3'", asks(fp8="e4m3")),
    Row(APPLY, "float16", "params_dtype=torch.float16", asks(params_dtype=torch.float16)),
    Row(APPLY, "a sliding window", "window_size=(128, 0): sliding windows are not supported", asks(window_size=(128, 0))),
    Row(APPLY, "LayerNorm", "normalization='LayerNorm': no other norm has a kernel; 'RMSNorm' would work", asks(normalization="LayerNorm")),
    Row(APPLY, "biases", "add_bias_linear=True: biases are not supported", asks(add_bias_linear=True)),
    Row(APPLY, "routing by sinkhorn", "routing by sinkhorn depends on the whole batch", asks(moe_router_load_balancing_type="sinkhorn")),
    Row(APPLY, "DeepEP", "moe_enable_deepep=True: DeepEP adds in an order of its own", asks(moe_enable_deepep=True)),
    Row(APPLY, "TP 4 on two leaves", "cut into 4 parts, but cuts.attn_row = 2 leaves", asks(Contract(cuts=Cuts(attn_row=2)), tensor_model_parallel_size=4)),
    Row(APPLY, "a contract that is a number", "contract: expected a contract, its fields, JSON or a path, got int", applied(5)),
    Row(APPLY, "a vocabulary of -1", "vocab_size", applied(Contract(), vocab_size=-1)),
    Row(APPLY, "a contract file that is not there", "contract: 'nowhere.json' is neither 1, default, a JSON object nor a file", applied("nowhere.json")),
    Row(VLLM, "float16", "dtype='float16': no other element type has kernels; use bfloat16 or float32", started("model_config.dtype", torch.float16)),
    Row(VLLM, "an FP8 cache", "would be kept in another type; use auto", started("cache_config.cache_dtype", "fp8_e4m3")),
    Row(VLLM, "pipeline stages", "pipeline_parallel_size=2: pipeline parallelism is not covered; use 1", started("parallel_config.pipeline_parallel_size", 2)),
    Row(VLLM, "a sliding window", "use full attention (use_sliding_window false)", started("model_config.hf_text_config.use_sliding_window", True)),
    Row(VLLM, "another activation", "hidden_act='gelu': only silu is covered", started("model_config.hf_text_config.hidden_act", "gelu")),
    Row(VLLM, "trust_remote_code", "trust_remote_code=True: no code of a checkpoint is run here", started("model_config.trust_remote_code", True)),
    Row(VLLM, "longer sequences than the model has positions", "max_model_len=4096: the model has 512 positions", started("model_config.max_model_len", 4096)),
    Row(
        VLLM,
        "TP 2 on one leaf",
        "cut into 2 parts, but cuts.expert_row = 1",
        started("parallel_config.tensor_parallel_size", 2, Contract(cuts=Cuts(expert_row=1))),
    ),
    Row(VLLM, "engine_options with tp True", "tp is True; expected a whole number of ranks, at least 1", contract_of(None, tp=True)),
    Row(VLLM, "engine_options with expert_parallel as text", "expert_parallel is 'yes'; expected True or False", contract_of(None, expert_parallel="yes")),
    Row(VLLM, "engine_options with a worker of somebody's", "worker_cls is the plug-in's own; leave it out", contract_of(None, worker_cls="x.Y")),
    Row(VLLM, "engine_options with vLLM's name for tp", "tensor_parallel_size is named by tp", contract_of(None, tensor_parallel_size=4)),
    Row(VLLM, "engine_options with additional_config as a list", "additional_config is []; expected a dictionary", contract_of(None, additional_config=[])),
    Row(VLLM, "a contract that is no JSON", "contract: not JSON", contract_of('{"cuts"')),
]
