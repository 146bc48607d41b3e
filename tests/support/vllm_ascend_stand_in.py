"""Stand-ins of the four classes of vllm-ascend that our attention names, for a CPU: what ours asks of them, and nothing that they compute."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch

NAME = "vllm_ascend.attention.attention_v1"


@dataclass
class AscendMetadata:
    """A step, as far as ours reads it."""

    num_actual_tokens: int
    seq_lens_cpu: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


class AscendAttentionMetadataBuilder:
    """Describes a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AscendMetadata:
        batch = common_attn_metadata
        return AscendMetadata(batch.num_actual_tokens, batch.seq_lens_cpu, batch.slot_mapping[: batch.num_actual_tokens], batch.block_table_tensor)


def modules() -> dict[str, types.ModuleType]:
    """``vllm_ascend`` and its modules down to that of the attention, by name. Their bases are those of the vLLM in this process."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

    class AscendAttentionBackendImpl(AttentionImpl):
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: Any,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None,
            attn_type: str,
            kv_sharing_target_layer_name: str | None,
            sinks: Any = None,
            **kwargs: Any,
        ) -> None:
            self.scale, self.attn_type, self.sliding_window, self.alibi_slopes = scale, attn_type, sliding_window, alibi_slopes
            self.sinks, self.enable_c8_quant, self.enable_hamming_sparse = sinks, False, False
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("vllm-ascend's attention ran")

    class AscendAttentionBackend(AttentionBackend):
        accept_output_buffer = True

        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            return AscendAttentionBackendImpl

        @staticmethod
        def get_builder_cls() -> type:
            return AscendAttentionMetadataBuilder

        @staticmethod
        def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "") -> tuple[int, ...]:
            return (2, num_blocks, block_size, num_kv_heads, head_size)

    found = {name: types.ModuleType(name) for name in ("vllm_ascend", "vllm_ascend.attention", NAME)}
    for name, module in found.items():
        module.__spec__ = ModuleSpec(name, None)
    attention: Any = found[NAME]
    attention.AscendAttentionBackend, attention.AscendAttentionBackendImpl = AscendAttentionBackend, AscendAttentionBackendImpl
    attention.AscendAttentionMetadataBuilder, attention.AscendMetadata = AscendAttentionMetadataBuilder, AscendMetadata
    return found


def install() -> None:
    """Make them importable in this process, for good."""
    sys.modules.update(modules())
