"""The class of vLLM 0.32 that holds the experts, with ours inside."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from tio_megatron.integrations.vllm.experts import FixedOrderExperts, OrderedExperts


class TioRoutedExperts(OrderedExperts, RoutedExperts):
    """The experts of one layer on this rank."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        if quant_config is not None:
            raise ValueError(f"{prefix}: quantization {quant_config.get_name()} is not covered")
        return FixedOrderExperts(moe_config)

    def refused(self) -> list[tuple[bool, str]]:
        """As vLLM 0.32 knows it."""
        return [*super().refused(), (self.swiglu_alpha is not None, "clamped swiglu"), (self.moe_config.skip_final_all_reduce, "unreduced results")]


REPLACEMENTS: dict[str, type] = {"RoutedExperts": TioRoutedExperts}
"""Stock class name -> ours, for the out-of-tree registry."""
