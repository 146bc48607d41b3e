"""Megatron-core modules with our arithmetic: subclasses that keep stock's weights, names, sharding and checkpoints, and replace ``forward``.

Only shapes, groups and leaf counts are adapted here. Each asks :func:`state.active` for the contract when it runs, so that a model cannot
run with half of the sums stock's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from tio_megatron.contract import Contract
from tio_megatron.integrations.megatron import groups
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.modules import masks
from tio_megatron.integrations.megatron.training import micro_batches
from tio_megatron.integrations.megatron.versions import release
from tio_megatron.kernels.rope import rope_table
from tio_megatron.layers.activation import swiglu
from tio_megatron.layers.context import context_attention
from tio_megatron.layers.linear import column_parallel, row_parallel
from tio_megatron.layers.norm import rms_norm
from tio_megatron.layers.sequences import Sequences
from tio_megatron.layers.vocab import VocabShard, vocab_embedding, vocab_logits


class OrderedColumnLinear(ColumnParallelLinear):
    """QKV and gate-up products. Nothing is summed over ranks forward; the input gradient is the tree over the global output axis."""

    def __init__(self, input_size: int, output_size: int, *, stride: int = 1, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, stride=stride, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        if self.is_expert:
            raise ValueError("an expert's product is part of the expert layer, not a column-parallel linear of its own")
        groups.keep_tensor_group(self)
        # megatron-core gives [gate; up] shards a stride of 2, from 0.16 on; every first product of an MLP is one (others are refused).
        self.gated = stride == 2 or tp_comm_buffer_name == "fc1"
        self.where = tp_comm_buffer_name or "column-parallel linear"
        self._leaves(state.active())

    def _leaves(self, contract: Contract) -> int:
        return contract.leaves_of("col_dgrad", self.output_size // (2 if self.gated else 1), self.tp_group.size(), f"{self.where} (input gradient)")

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (a slice of ``s`` under sequence parallelism) to ``[s, b, outputs of this rank]``."""
        y = column_parallel(
            input_,
            self.weight if weight is None else weight,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            dgrad_leaves=self._leaves(state.active()),
            gated=self.gated,
            batch=micro_batches.current(),
        )
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        return (groups.gathered(y, self.tp_group) if gather else y), None


class OrderedRowLinear(RowParallelLinear):
    """Attention output and down products: fp32 partial sums, the tree over the leaves of all ranks, one rounding."""

    def __init__(self, input_size: int, output_size: int, *, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        groups.keep_tensor_group(self)
        if self.is_expert:
            raise ValueError("an expert's product is part of the expert layer, not a row-parallel linear of its own")
        if not self.input_is_parallel:
            raise ValueError("row-parallel linear: input_is_parallel=False is not supported; give it the cut input")
        self.where = tp_comm_buffer_name or "row-parallel linear"
        self.axis = "attn_row" if tp_comm_buffer_name == "proj" else "mlp_row"
        self._leaves(state.active())

    def _leaves(self, contract: Contract) -> int:
        return contract.leaves_of(self.axis, self.input_size, self.tp_group.size(), self.where)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """``[s, b, inputs of this rank]`` to ``[s, b, h]`` (a slice of ``s`` under sequence parallelism)."""
        leaves = self._leaves(state.active())
        y = row_parallel(input_, self.weight, leaves=leaves, group=self.tp_group, sequence_parallel=self.sequence_parallel, batch=micro_batches.current())
        return y, None


class OrderedRMSNorm(torch.nn.Module):
    """RMSNorm of the hidden axis or of a head, with stock's parameter name.

    The weight's gradient is partial wherever this rank sees a part of the tokens or of the heads; the tag makes stock's
    ``finalize_model_grads`` sum it over the tensor-parallel group (query and key norms it finds by name).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any leading shape; the last axis is normalised."""
        state.active()
        return rms_norm(x, self.weight, self.eps)


class OrderedCoreAttention(MegatronModule):
    """Softmax attention over whole sequences, in a batch ``[s, b, heads, d]`` or packed ``[t, heads, d]``.

    Under context parallelism ``s`` and ``t`` are this rank's part; whatever ``cp_comm_type`` says, whole sequences are put together
    (:mod:`tio_megatron.layers.context`), since partial softmaxes merged in ring order have other bytes.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_type != "self":
            raise ValueError(f"attention: {attention_type} attention with mask {attn_mask_type.name} is not supported; causal self-attention is")
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        ranks = config.context_parallel_size
        held = groups.given(more) if ranks > 1 else groups.passed(more)
        self.cp_group = None if held is None else held.cp
        if self.cp_group is not None and self.cp_group.size() != ranks:
            raise ValueError(f"attention: context_parallel_size={ranks}, but the context-parallel group has {self.cp_group.size()} ranks; they must agree")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """The heads of each token joined: ``[s, b, heads * d]`` or ``[t, heads * d]``.

        Raises:
            ValueError: an attention bias, a mask that is not causal (padding on the right apart; under context parallelism any mask), a packed
                format other than thd, or sequences that do not divide into the chunks of context parallelism.
        """
        state.active()
        if attention_bias is not None:
            raise ValueError("attention: attention_bias (alibi and others) is not supported; pass None")
        rank, ranks = (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
        if packed_seq_params is None:
            masks.require_causal(attention_mask, query.shape[0], ranks)
            starts = None
        else:
            starts = micro_batches.packed_starts(packed_seq_params)
        sequences = Sequences(starts, rank, ranks)
        return context_attention(query, key, value, scale=self.scale, sequences=sequences, group=self.cp_group).flatten(-2)


@dataclass(frozen=True)
class Part:
    """What ``build_module`` needs of a spec. Not a ``ModuleSpec``: stock's layer warns of specs whose module it does not know."""

    module: type
    submodules: Any
    params: dict[str, Any]


class OrderedTransformerLayer(TransformerLayer):
    """Stock's layer. Only hands its process groups to our MLP or expert layer, which some releases do for their own classes alone."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        mlp = submodules.mlp
        if isinstance(mlp, ModuleSpec) and release().groups is not None and not release().mlp_is_called:
            held = groups.given(kwargs)
            group = groups.as_keyword(held) if issubclass(mlp.module, MoELayer) else {"tp_group": held.tp}
            submodules = replace(submodules, mlp=Part(mlp.module, mlp.submodules, mlp.params | group))
        super().__init__(config, submodules, *args, **kwargs)

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Stock's. Says which samples the rows belong to, again in a recomputation, when another micro-batch may have run since."""
        micro_batches.enter(packed_seq_params)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class OrderedMLP(MLP):
    """A gated MLP: product, silu and its product with up (each rounded once), product. The config's fusion switches do not matter here."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` to ``[s, b, h]``.

        Raises:
            ValueError: a per-token scale, which belongs to experts.
        """
        if per_token_scale is not None:
            raise ValueError("mlp: per_token_scale is not supported; experts weight their rows when they are combined")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_up))


class OrderedEmbedding(VocabParallelEmbedding):
    """Word embedding: each row is moved from its owner. Made of a stock instance by :func:`adopt_embedding`."""

    vocab: int

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` ids to ``[b, s, h]``, or to ``[s / tp, b, h]`` when the module scatters for sequence parallelism."""
        shard = vocab_shard(self.vocab, self.num_embeddings_per_partition, self.tp_group)
        rows = vocab_embedding(input_.transpose(0, 1), self.weight, shard, group=self.tp_group, sequence_parallel=self.reduce_scatter_embeddings)
        return rows if self.reduce_scatter_embeddings else rows.transpose(0, 1)


class OrderedOutput(ColumnParallelLinear):
    """The output layer: fp32 logits, not rounded. Made of a stock instance by :func:`adopt_output`."""

    vocab: int

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (a slice of ``s`` under sequence parallelism) to ``[s, b, rows of this rank]`` fp32; padding columns hold anything."""
        weight = self.weight if weight is None else weight
        shard = vocab_shard(self.vocab, weight.shape[0], self.tp_group)
        logits = vocab_logits(input_, weight, shard, group=self.tp_group, sequence_parallel=self.sequence_parallel, batch=micro_batches.current())
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        return (groups.gathered(logits, self.tp_group) if gather else logits), None


class OrderedRotaryEmbedding(RotaryEmbedding):
    """Gives the table of cosines and sines in the place of stock's angles; :mod:`.patches` gives the rotation that reads it."""

    def __init__(self, kv_channels: int, base: float, cp_group: Any) -> None:
        torch.nn.Module.__init__(self)
        self.dim, self.base, self.cp_group = kv_channels, base, cp_group

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> torch.Tensor:
        """``[positions, 1, 1, d]`` fp32, cosines then sines: of all positions, since under context parallelism the rotation picks a rank's own."""
        if offset:
            raise ValueError(f"rope: offset {offset} is not supported; positions count from 0 in each sequence")
        return rope_table(int(max_seq_len), self.dim, float(self.base))[:, None, None, :]

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> int:
        """Stock's length, and no less than the longest packed sample with its padding, which ``max_seqlen_q`` may leave out."""
        if len(args) > 4:
            *args, packed_seq_params = args  # type: ignore[assignment]
        length = int(super().get_rotary_seq_len(*args, packed_seq_params=packed_seq_params, **kwargs))
        if packed_seq_params is None:
            return length
        sizes = micro_batches.packed_starts(packed_seq_params).diff()
        return max(length, int(sizes.max())) if sizes.numel() else length


def vocab_shard(vocab: int, rows: int, group: Any) -> VocabShard:
    """This rank's part of a vocabulary of ``vocab`` true rows, under the contract in force.

    Raises:
        ValueError: the cut does not fall on the contract's blocks.
    """
    return VocabShard(state.active().vocab_order(vocab), rows, group.rank(), group.size())


def adopt_embedding(module: VocabParallelEmbedding, vocab: int) -> None:
    """Make ``module`` (and what holds a reference to it) compute as ours, keeping its weight."""
    module.__class__ = OrderedEmbedding
    groups.keep_tensor_group(module)
    module.vocab = vocab


def adopt_output(module: ColumnParallelLinear, vocab: int) -> None:
    """Make ``module`` (and what holds a reference to it) compute as ours, keeping its weight."""
    module.__class__ = OrderedOutput
    groups.keep_tensor_group(module)
    module.vocab = vocab
