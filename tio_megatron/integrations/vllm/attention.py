"""Attention over vLLM's pages: the walk over 64 keys counted from position 0 of each sequence, whatever the chunk, page and batch.

The pages' interior is ours, since reader and writer are. Shapes: T tokens, heads of size D, pages [blocks, kv heads, block size, 2 D].
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata, CPUAttentionMetadataBuilder

from tio_megatron.integrations.vllm.refused_options import BLOCK
from tio_megatron.kernels.attention import attention_paged, write_pages


class TioAttentionBackend(CPUAttentionBackend):
    """Handed to vLLM's ``Attention`` while one of our models is built; elsewhere in the process attention stays stock's."""

    @staticmethod
    def get_impl_cls() -> type[TioAttentionImpl]:
        """Writes and reads the pages."""
        return TioAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TioAttentionMetadataBuilder]:
        """Describes one step's batch."""
        return TioAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """A page holds whole blocks of the walk."""
        return [MultipleOf(BLOCK)]


class TioAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Without stock's schedule for its own kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.block_size % BLOCK:
            raise ValueError(f"block_size {self.block_size}: use a multiple of {BLOCK}")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CPUAttentionMetadata:
        """The batch of one step, for every layer."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ValueError("attention: only causal attention is covered")
        return CPUAttentionMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            max_seq_len=batch.max_seq_len,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            scheduler_metadata=None,
            causal=True,
        )


class TioAttentionImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = [
            (self.attn_type != AttentionType.DECODER, f"attention type {self.attn_type}"),
            (self.sliding_window != -1, f"sliding window {self.sliding_window}"),
            (self.alibi_slopes is not None, "alibi"),
            (bool(self.logits_soft_cap), "logits soft cap"),
            (self.sinks is not None, "attention sinks"),
            (self.is_fp8_kv_cache, f"kv_cache_dtype {self.kv_cache_dtype}"),
            (self.kv_sharing_target_layer_name is not None, "shared key/value caches"),
            (self.head_size > 256, f"head size {self.head_size} (at most 256)"),
        ]
        found = [what for wrong, what in refused if wrong]
        if found:
            raise ValueError(f"attention: not covered: {', '.join(found)}")

    def do_kv_cache_update(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write ``key``, ``value`` [T, kv heads, D] into their slots; slots below 0 are padding."""
        write_pages(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` [T, heads, D] over the pages -> ``output`` [T, heads, D], written in place."""
        if attn_metadata is None:
            # vLLM's warm-up runs without a batch; the rows are thrown away.
            return output.zero_()
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        attention_paged(query[:tokens], kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, scale=self.scale, out=output[:tokens])
        return output
