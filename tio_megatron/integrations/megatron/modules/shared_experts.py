"""Megatron's shared experts with our arithmetic: a dense gated MLP that every token goes through, cut over tensor-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from tio_megatron.layers.activation import swiglu


class OrderedSharedExpertMLP(SharedExpertMLP):
    """``SharedExpertMLP`` on our linears. Its output is added to the routed experts' by the layer, in the activation dtype (one rounding)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, H] to [s, b, H] (slices of s under sequence parallelism)."""
        gate_up, _ = self.linear_fc1(hidden_states)
        out: torch.Tensor = self.linear_fc2(swiglu(gate_up))[0]
        return out
