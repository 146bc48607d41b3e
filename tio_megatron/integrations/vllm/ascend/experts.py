"""The class of vLLM 0.23 that holds the experts, with ours inside. vllm-ascend puts its own in the same place for other models. *Built, not run.*"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.layer import FusedMoE

from tio_megatron.integrations.vllm.experts import FixedOrderExperts, OrderedExperts


class TioFusedMoE(OrderedExperts, FusedMoE):
    """The experts of one layer on this rank."""

    def __init__(self, *args: Any, quant_config: Any = None, **kwargs: Any) -> None:
        if quant_config is not None:
            raise ValueError(f"experts: quantization {quant_config.get_name()} is not covered")
        super().__init__(*args, quant_config=None, **kwargs)
        # The weights were made by the unquantized method, as ours would; the runner is told too.
        self._replace_quant_method(FixedOrderExperts(self.moe_config))

    def width(self) -> int:
        """The whole width of one expert, over all ranks."""
        return self.moe_config.intermediate_size_per_partition * self.tp_size


REPLACEMENTS: dict[str, type] = {"FusedMoE": TioFusedMoE}
"""Stock class name -> ours, for the out-of-tree registry."""
