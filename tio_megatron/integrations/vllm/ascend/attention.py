"""Attention over vllm-ascend's pages: its backend, builder and cache, with our kernel family's write and walk inside. *Built, not run.*

Shapes: T tokens, heads of size D, keys and values [pages, page, kv heads, D] each, as vllm-ascend allocates them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm_ascend.attention.attention_v1 import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AscendMetadata,
)

from tio_megatron.integrations.vllm.ascend.pages import one_cache
from tio_megatron.kernels.attention import attention_paged, write_pages


class TioAscendAttentionBackend(AscendAttentionBackend):
    """Handed to vLLM's ``Attention`` while one of our models is built; cache shape, page size and the rest are vllm-ascend's."""

    @staticmethod
    def get_impl_cls() -> type[TioAscendAttentionImpl]:
        """Writes and reads the pages."""
        return TioAscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TioAscendAttentionMetadataBuilder]:
        """Describes one step's batch."""
        return TioAscendAttentionMetadataBuilder


class TioAscendAttentionMetadataBuilder(AscendAttentionMetadataBuilder):
    """vllm-ascend's description of a step, and the lengths as our kernels take them: on the host, once a step."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AscendMetadata:
        """The batch of one step, for every layer.

        Raises:
            ValueError: attention that is not causal.
        """
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ValueError("attention: only causal attention is covered")
        step = super().build(common_prefix_len, batch, fast_build)
        step.tio_starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].to(torch.int32)
        step.tio_lengths = step.seq_lens_cpu[: batch.num_reqs].to(torch.int32)
        step.tio_slots = step.slot_mapping.to(torch.int64)
        return step


class TioAscendAttentionImpl(AscendAttentionBackendImpl):
    """One layer's attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = [
            (self.attn_type != AttentionType.DECODER, f"attention type {self.attn_type}"),
            (self.sliding_window is not None, f"sliding window {self.sliding_window}"),
            (self.alibi_slopes is not None, "alibi"),
            (self.sinks is not None, "attention sinks"),
            (self.enable_c8_quant, "a quantized cache"),
            (self.enable_hamming_sparse, "hamming_sparse"),
            (self.kv_sharing_target_layer_name is not None, "shared key/value caches"),
        ]
        found = [what for wrong, what in refused if wrong]
        if found:
            raise ValueError(f"attention: not covered: {', '.join(found)}")
        self.cache: torch.Tensor | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        attn_metadata: AscendMetadata,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` [T, heads, D] over the pages -> ``output`` [T, heads, D], written in place; keys and values of the step are written first."""
        assert output is not None
        if attn_metadata is None:
            # The profiling run has no batch; the rows are thrown away.
            return output.fill_(0)
        if self.cache is None:
            self.cache = one_cache(kv_cache[0], kv_cache[1])
        step, tokens = attn_metadata, attn_metadata.num_actual_tokens
        write_pages(key[:tokens], value[:tokens], self.cache, step.tio_slots[:tokens])
        attention_paged(query[:tokens], self.cache, step.block_tables, step.tio_lengths, step.tio_starts, scale=self.scale, out=output[:tokens])
        return output
