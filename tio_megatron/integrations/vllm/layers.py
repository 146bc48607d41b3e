"""Our layers under vLLM's names. Sharding, loading and parameter names stay vLLM's; the products, norms and moves are ours.

Shapes: T tokens, H hidden, D head size, N rows of a weight, K its columns, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding

from tio_megatron.collectives import all_reduce
from tio_megatron.integrations.vllm.building import current
from tio_megatron.integrations.vllm.opaque import Opaque
from tio_megatron.integrations.vllm.weights import OneCopy
from tio_megatron.kernels.embedding import embedding
from tio_megatron.kernels.linear import PackedWeight, linear
from tio_megatron.kernels.norm import add_rms_norm, rms_norm
from tio_megatron.kernels.rope import rope, rope_table
from tio_megatron.kernels.swiglu import swiglu
from tio_megatron.models import row_axis


class SealAfterLoading(UnquantizedLinearMethod):
    """The linear method of our layers: packs instead of stock's CPU packing; the product is the layer's own ``forward``."""

    def __init__(self) -> None:
        # Stock's constructor chooses a product; there is none here.
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called by vLLM after a load."""
        layer.seal()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Refused: a caller that comes here would pass by the layer's ``forward``."""
        raise NotImplementedError(f"{type(layer).__name__}: call the layer, not its linear method")


class FixedOrder(OneCopy):
    """Mixin of the linear layers: unquantized, without bias, one packed weight."""

    packed: PackedWeight
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self, LinearBase)
        if type(self.quant_method) is not UnquantizedLinearMethod:
            raise ValueError(f"{self.prefix}: weights are handled by {type(self.quant_method).__name__}; only unquantized weights are covered")
        if self.bias is not None:
            raise ValueError(f"{self.prefix}: a bias is not covered")
        self.quant_method = SealAfterLoading()
        self.keep_packed("weight", "packed", PackedWeight.from_weight, current().ledger)


class TioReplicatedLinear(FixedOrder, ReplicatedLinear):
    """A product that no layout cuts."""

    def forward(self, x: torch.Tensor) -> Any:
        """``x`` [T, K] -> [T, N]."""
        y = linear(x, self.packed, leaves=1)
        return (y, None) if self.return_bias else y


class _Column(FixedOrder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gather_output:
            raise ValueError(f"{self.prefix}: gather_output is not covered")

    def forward(self, input_: torch.Tensor) -> Any:
        """``input_`` [T, K] -> this rank's columns [T, N / TP]. K is never cut: one leaf."""
        y = linear(input_, self.packed, leaves=1)
        return (y, None) if self.return_bias else y


class TioColumnParallelLinear(_Column, ColumnParallelLinear):
    """Output axis cut by TP."""


class TioMergedColumnParallelLinear(_Column, MergedColumnParallelLinear):
    """Gate and up: two output axes, each cut by TP."""


class TioQKVParallelLinear(_Column, QKVParallelLinear):
    """Query, key and value heads, cut by TP; key/value heads are repeated when there are fewer than ranks."""


class TioRowParallelLinear(Opaque, FixedOrder, RowParallelLinear):
    """The summed axis is cut by TP: each rank owns a node of the tree, partial sums travel in fp32, one rounding at the root."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        axis = row_axis(self.prefix)
        if axis is None:
            raise ValueError(f"{self.prefix}: no axis of the contract is known for this layer; descriptions of models name the layers that have one")
        if not (self.input_is_parallel and (self.reduce_results or self.tp_size == 1)):
            raise ValueError(f"{self.prefix}: only parallel input with reduced results is covered")
        self.leaves = current().contract.leaves_of(axis, self.input_size, self.tp_size, self.prefix)
        self.group = get_tp_group().device_group if self.tp_size > 1 else None
        self.become_opaque(self.prefix)

    def forward(self, input_: torch.Tensor) -> Any:
        """``input_`` [T, K / TP] -> [T, N], the whole sum on every rank."""
        y = linear(input_, self.packed, leaves=self.leaves) if self.group is None else self.call(input_)
        return (y, None) if self.return_bias else y

    def compute(self, x: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        """The sum over the ranks."""
        partial = linear(x, self.packed, leaves=self.leaves, out_dtype=torch.float32)
        return all_reduce(partial, self.group, out_dtype=x.dtype)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return x.new_empty(x.shape[0], self.output_size)


class TioGateLinear(FixedOrder, GateLinear):
    """The router's product: fp32 logits, never cut."""

    def forward(self, x: torch.Tensor) -> Any:
        """``x`` [T, H] -> logits [T, E] fp32."""
        y = linear(x, self.packed, leaves=1, out_dtype=torch.float32)
        return (y, None) if self.return_bias else y


class TioRMSNorm(RMSNorm):
    """The residual sum is rounded once, and the rounded sum is what is normalised, as in a trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.has_weight or self.variance_size_override is not None:
            raise ValueError("RMSNorm: only a norm with a weight over the whole axis is covered")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """``x`` [..., H] -> y; with ``residual``: (y, x + residual)."""
        weight = self.weight.data
        if residual is None:
            return rms_norm(x, weight, self.variance_epsilon)
        return add_rms_norm(x, residual, weight, self.variance_epsilon)


class TioRotaryEmbedding(RotaryEmbedding):
    """fp32 tables from float64; one rounding of the rotated head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_cache": False})
        if not self.is_neox_style or self.rotary_dim != self.head_size:
            raise ValueError(f"rope: {self.rotary_dim} of {self.head_size} elements, neox {self.is_neox_style}; only whole heads in neox style are covered")
        self.table = rope_table(self.max_position_embeddings, self.rotary_dim, self.base)

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``positions`` [T], ``query`` [T, heads * D], ``key`` [T, kv heads * D] -> both rotated, same shapes."""
        return self._rotate(query, positions), None if key is None else self._rotate(key, positions)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rope(x.view(x.shape[0], -1, self.head_size), positions, self.table).view(x.shape)


class TioSiluAndMul(SiluAndMul):
    """silu(gate) * up with the contract's two roundings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., 2 I] (gate, then up) -> [..., I]."""
        return swiglu(x)


class SealVocabulary(UnquantizedEmbeddingMethod):
    """The method of embedding and head: packs after a load, and ties."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called by vLLM after a load."""
        layer.seal()

    def tie_weights(self, layer: Any, embed_tokens: VocabParallelEmbedding) -> Any:
        """One copy for both: the embedding's, packed."""
        layer.share(embed_tokens)
        return layer

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 logits of this rank's rows of the vocabulary."""
        return layer.logits(x)


class TioVocabParallelEmbedding(Opaque, OneCopy, VocabParallelEmbedding):
    """Every row has one owner: rows are moved, not summed. Its rows lie as they are; packed, once a head shares them."""

    packed: PackedWeight
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is not UnquantizedEmbeddingMethod:
            raise ValueError(f"{self.prefix}: only unquantized embeddings are covered")
        # vLLM 0.23 has neither switch: it always reduces, over the tensor-parallel group.
        if self.num_added_embeddings or not getattr(self, "reduce_results", True) or getattr(self, "parallel_group", None) is not None:
            raise ValueError(f"{self.prefix}: added rows, unreduced results and own groups are not covered")
        self.quant_method = SealVocabulary()
        self.first_row = self.shard_indices.org_vocab_start_index
        self.group = get_tp_group().device_group if self.tp_size > 1 else None
        self.tied = False
        self.become_opaque("embedding")

    def pack_for(self, head: TioParallelLMHead) -> None:
        """Hold the rows packed, as ``head`` reads them."""
        self.tied = True
        self.keep_packed("weight", "packed", PackedWeight.from_weight, head.ledger)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """``input_`` [T] ids -> [T, H].

        Raises:
            ValueError: an id outside the vocabulary. vLLM itself looks only where a tokenizer is loaded.
        """
        return self.call(input_)

    def compute(self, x: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        """The rows of the ids ``x``."""
        if x.numel():
            low, high = torch.aminmax(x)
            if low < 0 or high >= self.org_vocab_size:
                raise ValueError(f"token ids {int(low)} to {int(high)} are not inside the vocabulary of {self.org_vocab_size}")
        rows = embedding(x.long(), self.packed if self.tied else self.weight.data, self.first_row)
        if self.group is not None:
            # All ranks but the owner hold zero bits, so an integer sum moves the owner's bits unchanged.
            torch.distributed.all_reduce(rows.view(torch.int32), group=self.group)
        return rows

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]."""
        return torch.empty(x.shape[0], self.embedding_dim, dtype=self.weight.dtype, device=x.device)


class TioParallelLMHead(OneCopy, ParallelLMHead):
    """fp32 logits; the vocabulary is cut by TP, H is not."""

    packed: PackedWeight
    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is not UnquantizedEmbeddingMethod or self.bias is not None:
            raise ValueError(f"{self.prefix}: only an unquantized head without bias is covered")
        self.quant_method = SealVocabulary()
        self.embedding: tuple[TioVocabParallelEmbedding, ...] = ()
        self.keep_packed("weight", "packed", PackedWeight.from_weight, current().ledger)

    def share(self, embed_tokens: TioVocabParallelEmbedding) -> None:
        """Read the packed rows of the embedding, and hold none."""
        self.weight = embed_tokens.weight
        self.slots.clear()
        embed_tokens.pack_for(self)
        # In a tuple: the embedding is no part of the head.
        self.embedding = (embed_tokens,)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H] -> [T, V / TP] fp32, padding rows included."""
        packed = self.embedding[0].packed if self.embedding else self.packed
        return linear(x, packed, leaves=1, out_dtype=torch.float32)


class TioLogitsProcessor(LogitsProcessor):
    """Gathers and cuts off the padding as stock does; the head is always our fp32 one, whatever ``head_dtype`` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.soft_cap is not None or self.scale != 1.0 or self.logits_as_input:
            raise ValueError("logits: soft cap, scale and given logits are not covered")

    def _apply_head(self, lm_head: TioParallelLMHead, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        return lm_head.logits(hidden_states)


REPLACEMENTS: dict[str, type] = {
    "ReplicatedLinear": TioReplicatedLinear,
    "ColumnParallelLinear": TioColumnParallelLinear,
    "MergedColumnParallelLinear": TioMergedColumnParallelLinear,
    "QKVParallelLinear": TioQKVParallelLinear,
    "RowParallelLinear": TioRowParallelLinear,
    "GateLinear": TioGateLinear,
    "RMSNorm": TioRMSNorm,
    "RotaryEmbedding": TioRotaryEmbedding,
    "SiluAndMul": TioSiluAndMul,
    "VocabParallelEmbedding": TioVocabParallelEmbedding,
    "ParallelLMHead": TioParallelLMHead,
    "LogitsProcessor": TioLogitsProcessor,
}
"""Stock class name -> ours, for the out-of-tree registry."""
