"""Megatron's two kinds of expert modules, both computed by one grouped product.

Weights and their names, per local expert ``i`` (``I`` is the expert width over expert-tensor-parallel ranks, gate rows first):

* grouped (``moe_grouped_gemm=True``): ``linear_fc1.weight{i}`` [2 * I, H] and ``linear_fc2.weight{i}`` [H, I], the names of Megatron's
  TransformerEngine experts, so its checkpoint converters apply. Not those of the legacy module (``weight1``, ``weight2``, transposed).
* sequential: stock's own ``local_experts.{i}.linear_fc1.weight`` and ``local_experts.{i}.linear_fc2.weight``, same shapes.

Both save distributed checkpoints under the same keys as stock, with the global expert number as an axis.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.transformer.mlp import MLPSubmodules, apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from tio_megatron.integrations.megatron import groups
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.resume.extra_state import NAME as EXTRA_STATE
from tio_megatron.integrations.megatron.resume.extra_state import KeepsExtraState
from tio_megatron.integrations.megatron.weights.random_weights import among_all_experts, whole
from tio_megatron.layers.experts import ExpertMLP, RowLabels


def run_experts(
    x: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    labels: RowLabels | None,
    w13: Sequence[Parameter],
    w2: Sequence[Parameter],
    config: TransformerConfig,
    group: ProcessGroup,
) -> torch.Tensor:
    """Rows [R, H] sorted by expert through their experts; complete rows on every rank of the expert-tensor-parallel ``group``.

    Raises:
        ValueError: the expert width, or its cut, does not fall on the contract's leaves.
        RuntimeError: no contract is applied.
    """
    contract, width = state.active(), config.moe_ffn_hidden_size
    leaves = contract.leaves_of("expert_row", width, group.size(), "experts.linear_fc2")
    dgrad_leaves = contract.leaves_of("expert_col_dgrad", width, group.size(), "experts.linear_fc1 (input gradient)")
    offsets = torch.cat((tokens_per_expert.new_zeros(1), tokens_per_expert.cumsum(0)))
    rows: torch.Tensor = ExpertMLP.apply(x, offsets, leaves, dgrad_leaves, group, labels, *w13, *w2)
    return rows


def _tag(weights: Sequence[Parameter]) -> None:
    """Tell DDP and the optimizer that these are experts, whatever the layout.

    Stock does so only when experts are cut by EP. With one EP rank and ETP smaller than TP the ranks of TP hold the same experts but saw
    different tokens, so there the dense data-parallel group would leave part of the gradient's sum out. And experts that are sometimes
    in the dense optimizer, sometimes in their own, would keep a checkpoint from loading in another layout.
    """
    for weight in weights:
        weight.allreduce = False  # type: ignore[attr-defined]


class OrderedSequentialMLP(SequentialMLP):
    """``SequentialMLP``: its modules hold the weights, one grouped product computes all of them."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: MLPSubmodules, **more: Any) -> None:
        held = groups.given(more)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        draws = (config.init_method, (2 * width, hidden)), (config.output_layer_init_method, (hidden, width))
        with among_all_experts(config, num_local_experts, held.ep, *draws):
            super().__init__(num_local_experts, config, submodules, **more)
        self.ep_group, self.tp_group = held.ep, held.expt_tp
        _tag(list(self.parameters()))

    def forward(self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: Any) -> tuple[torch.Tensor, None]:
        """Rows [R, H] sorted by expert and the rows of each, [n] int64 -> complete, unweighted rows.

        In the place of ``permuted_probs`` our dispatchers hand over where the rows come from.
        """
        w13 = [expert.linear_fc1.weight for expert in self.local_experts]
        w2 = [expert.linear_fc2.weight for expert in self.local_experts]
        return run_experts(permuted_local_hidden_states, tokens_per_expert, permuted_probs, w13, w2, self.config, self.tp_group), None


class _ExpertWeights(KeepsExtraState, MegatronModule):
    """One projection of all local experts: ``weight0``, ``weight1``, ... each [out, in], cut over ``group`` along ``axis``."""

    _each: tuple[Any, ...] | list[Any] = ()

    def __init__(
        self,
        count: int,
        out: int,
        inside: int,
        axis: int,
        stride: int,
        init_method: Callable[[torch.Tensor], Any],
        config: TransformerConfig,
        ep: ProcessGroup,
        group: ProcessGroup,
    ) -> None:
        super().__init__(config)
        shape = [out, inside]
        if shape[axis] % (group.size() * stride):
            raise ValueError(f"experts: an axis of {shape[axis]} does not divide by {group.size()} expert-tensor-parallel ranks")
        shape[axis] //= group.size()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        with among_all_experts(config, count, ep, (init_method, (out, inside))):
            for i in range(count):
                weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
                if whole(config):
                    place = {"params_dtype": config.params_dtype, "rank": group.rank(), "world_size": group.size()}
                    _initialize_affine_weight_cpu(weight, out, inside, shape[axis], axis, init_method, stride, **place)
                elif config.perform_initialization:
                    _initialize_affine_weight_gpu(weight, init_method, axis, stride=stride, is_expert=True)
                setattr(self, f"weight{i}", weight)

    def weights(self) -> list[Parameter]:
        """One for each local expert."""
        return [self.get_parameter(f"weight{i}") for i in range(len(self._parameters))]

    def extra_states(self) -> list[Any]:
        """One for each local expert, as distributed checkpoints hold them. What came whole, from a plain state dict, is taken apart only where it is
        empty (no FP8): that takes reading, and stock unpickles it."""
        count, whole = len(self._parameters), self.get_extra_state()
        empty = isinstance(whole, torch.Tensor) and whole.numel() == 0
        return list(self._each) or [whole if count == 1 or empty else None] * count

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        keys = [f"{prefix}{EXTRA_STATE}{i or ''}" for i in range(len(self._parameters))]
        if len(keys) > 1 and keys[1] in state_dict:
            self._each = [state_dict.pop(key, None) for key in keys]
        super()._load_from_state_dict(state_dict, prefix, *args)


class OrderedGroupedMLP(MegatronModule):
    """Experts as one grouped product, with the parameter names of Megatron's TransformerEngine experts."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, submodules: MLPSubmodules | None = None, **more: Any) -> None:
        """``submodules`` is not read; stock passes it for its own grouped experts."""
        super().__init__(config)
        held = groups.given(more)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = held.ep, held.expt_tp, held.expt_dp
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = _ExpertWeights(num_local_experts, 2 * width, hidden, 0, 2, config.init_method, config, self.ep_group, self.tp_group)
        self.linear_fc2 = _ExpertWeights(num_local_experts, hidden, width, 1, 1, config.output_layer_init_method, config, self.ep_group, self.tp_group)
        _tag(list(self.parameters()))

    def forward(self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: Any) -> tuple[torch.Tensor, None]:
        """Rows [R, H] sorted by expert and the rows of each, [n] int64 -> complete, unweighted rows.

        In the place of ``permuted_probs`` our dispatchers hand over where the rows come from.
        """
        w13, w2 = self.linear_fc1.weights(), self.linear_fc2.weights()
        return run_experts(permuted_local_hidden_states, tokens_per_expert, permuted_probs, w13, w2, self.config, self.tp_group), None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """The same keys and global shapes as ``SequentialMLP``, so checkpoints of either load into the other."""
        apart = bool((metadata or {}).get("singleton_local_shards", False))
        total, first = self.ep_group.size() * self.num_local_experts, self.ep_group.rank() * self.num_local_experts
        replica = (0, 0, self.dp_group.rank())
        out: dict[str, Any] = {}
        for name, module, axis in (("linear_fc1", self.linear_fc1, 0), ("linear_fc2", self.linear_fc2, 1)):
            for i, weight in enumerate(module.weights()):
                key = f"{prefix}experts.{first + i}.{name}" if apart else f"{prefix}experts.{name}"
                offsets = sharded_offsets if apart else (*sharded_offsets, (len(sharded_offsets), first + i, total))
                sharded = make_tp_sharded_tensor_for_checkpoint(
                    weight, f"{key}.weight", axis, replica_id=replica, prepend_offsets=offsets, tp_group=self.tp_group, dp_cp_group=self.dp_group
                )
                out[f"{prefix}{name}.weight{i}"] = apply_swiglu_sharded_factory(sharded, offsets, apart) if axis == 0 else sharded
                held, place = module.extra_states()[i], (0, self.tp_group.rank(), self.dp_group.rank())
                out[f"{prefix}{name}.{EXTRA_STATE}{i or ''}"] = make_sharded_object_for_checkpoint(held, f"{key}.{EXTRA_STATE}", offsets, place)
        return out
