"""Experts under vLLM's names: routing, experts and the sum over ranks are one call, and vLLM adds no reduction of its own.

Shapes: T tokens, H hidden, E experts, k choices of a token, I width of one expert, n experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from tio_megatron.integrations.vllm.building import current
from tio_megatron.integrations.vllm.opaque import Opaque
from tio_megatron.integrations.vllm.weights import OneCopy
from tio_megatron.kernels.grouped import PackedExperts
from tio_megatron.kernels.router import route
from tio_megatron.layers.experts_replicated import experts_replicated


class _Kernel:
    """What vLLM's runner asks of an experts kernel: ours routes by itself, and its output is the whole sum."""

    is_monolithic = True
    can_overlap_shared_experts = False

    class fused_experts:  # noqa: N801  (vLLM reads this attribute)
        consumes_expert_mask = False

    @staticmethod
    def output_is_reduced() -> bool:
        return True


class FixedOrderExperts(FusedMoEMethodBase):
    """vLLM's method object for :class:`OrderedExperts`; weights are created by the stock unquantized method."""

    create_weights = UnquantizedFusedMoEMethod.create_weights

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.moe_kernel = _Kernel()

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """Nothing is quantized."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called by vLLM after a load."""
        layer.seal()

    def apply_monolithic(self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [T, H], ``router_logits`` [T, E] fp32 -> [T, H]."""
        return layer.call(x, router_logits)


class OrderedExperts(Opaque, OneCopy):
    """Mixin before vLLM's class of the experts of one layer on this rank: cut by TP, or whole experts with expert parallelism."""

    w13: PackedExperts
    w2: PackedExperts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = [what for wrong, what in self.refused() if wrong]
        if found:
            raise ValueError(f"{self.layer_name}: not covered: {', '.join(found)}; softmax top-k with silu is")
        parallel = self.moe_config.moe_parallel_config
        count, ranks = self.global_num_experts, parallel.ep_size if parallel.use_ep else 1
        self.spans = tuple(_span(rank, ranks, count) for rank in range(ranks))
        self.span = self.spans[parallel.ep_rank if parallel.use_ep else 0]
        cut = 1 if parallel.use_ep else parallel.tp_size
        self.leaves = current().contract.leaves_of("expert_row", self.width(), cut, f"{self.layer_name}.down")
        self.ep_group = get_ep_group().device_group if ranks > 1 else None
        self.etp_group = get_tp_group().device_group if cut > 1 else None
        self.keep_packed("w13_weight", "w13", PackedExperts.from_weights, current().ledger)
        self.keep_packed("w2_weight", "w2", PackedExperts.from_weights, current().ledger)
        self.become_opaque(self.layer_name)

    def refused(self) -> list[tuple[bool, str]]:
        """What the layer may not have: whether it has it, and its name."""
        return [
            (self.scoring_func != "softmax", f"scoring function {self.scoring_func}"),
            (bool(self.use_grouped_topk or self.num_expert_group or self.topk_group), "grouped top-k"),
            (self.custom_routing_function is not None, "a custom routing function"),
            (self.e_score_correction_bias is not None, "a score correction bias"),
            (self.apply_router_weight_on_input, "router weights on the input"),
            (self.routed_scaling_factor != 1.0, f"routed scaling factor {self.routed_scaling_factor}"),
            (self.activation != MoEActivation.SILU, f"activation {self.activation}"),
            (self.swiglu_limit is not None, "clamped swiglu"),
            (self.moe_config.has_bias, "a bias"),
            (self.moe_config.is_sequence_parallel, "sequence-parallel experts"),
            (self.moe_config.num_experts != self.moe_config.num_logical_experts, "redundant experts"),
        ]

    def width(self) -> int:
        """The whole width of one expert, over all ranks."""
        return self.moe_config.intermediate_size

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]."""
        return torch.empty_like(x)

    def compute(self, x: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        """``x`` [T, H], ``second`` the logits [T, E] fp32 -> the experts' sum [T, H], the same on every rank."""
        assert second is not None
        ids, probs = route(second, self.top_k, self.renormalize)
        return experts_replicated(
            x,
            ids,
            probs,
            self.w13,
            self.w2,
            experts=self.global_num_experts,
            spans=self.spans,
            span=self.span,
            leaves=self.leaves,
            ep_group=self.ep_group,
            etp_group=self.etp_group,
        )


def _span(rank: int, ranks: int, experts: int) -> tuple[int, int]:
    """The experts of one rank, as vLLM deals them out."""
    if ranks == 1:
        return 0, experts
    _, table, _ = determine_expert_map(ranks, rank, experts)
    assert table is not None
    held = (table >= 0).nonzero().view(-1).tolist()
    if held != list(range(held[0], held[0] + len(held))):
        raise ValueError(f"expert parallel rank {rank} holds {held}; only a run of experts is covered (expert_placement_strategy linear)")
    return held[0], held[-1] + 1
