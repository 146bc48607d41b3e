"""The classes of vLLM 0.23 that hold the experts and their router, with ours inside; vllm-ascend puts its own in the same place for other models.

*Built, not run* on an NPU. ``make test-vllm-ascend VLLM=DIR`` builds and runs a model of them in vLLM 0.23's code, on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.layer import FusedMoE

from tio_megatron.integrations.vllm.experts import FixedOrderExperts, OrderedExperts
from tio_megatron.integrations.vllm.layers import TioReplicatedLinear
from tio_megatron.kernels.linear import linear


class TioFusedMoE(OrderedExperts, FusedMoE):
    """The experts of one layer on this rank."""

    def __init__(self, *args: Any, quant_config: Any = None, **kwargs: Any) -> None:
        if quant_config is not None:
            raise ValueError(f"experts: quantization {quant_config.get_name()} is not covered")
        super().__init__(*args, quant_config=None, **kwargs)
        # The weights were made by the unquantized method, as ours would. That method is a module and ours is none: it must go before ours can come.
        for holder, name in ((self, "quant_method"), (self, "base_quant_method"), (self.runner, "_quant_method")):
            holder._modules.pop(name, None)
        self._replace_quant_method(FixedOrderExperts(self.moe_config))
        self.base_quant_method = self.quant_method

    def width(self) -> int:
        """The whole width of one expert, over all ranks."""
        return self.moe_config.intermediate_size_per_partition * self.tp_size


class TioReplicatedOrGate(TioReplicatedLinear):
    """A product that no layout cuts. vLLM 0.23 makes the router of the same class; it is the one called ``gate``, and its logits are fp32."""

    def forward(self, x: torch.Tensor) -> Any:
        """``x`` [T, K] -> [T, N], fp32 if it is a router."""
        if self.prefix.rpartition(".")[2] != "gate":
            return super().forward(x)
        y = linear(x, self.packed, leaves=1, out_dtype=torch.float32)
        return (y, None) if self.return_bias else y


REPLACEMENTS: dict[str, type] = {"FusedMoE": TioFusedMoE, "ReplicatedLinear": TioReplicatedOrGate}
"""Stock class name -> ours, for the out-of-tree registry."""
