"""What the stock control needs on a CPU, without a contract: engines that can be given new weights, and attention that takes verl's mask.

vLLM packs the weights of linears and of experts once, when a model is loaded, for its CPU kernels. verl loads weights again before every rollout: a
linear's parameter is empty by then, and experts are not packed again, so that the kernel would read them in the wrong order. Here weights stay as they
are loaded; torch multiplies linears, and experts are packed when they are used and go into vLLM's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tio_megatron.integrations.patching import Patch

SUPPORTED_VLLM = "vllm 0.32.0"
LINEARS = "vllm.model_executor.layers.utils"
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


def stock_patches() -> list[Patch]:
    """All of them. Under a contract the layers are ours, and pack what is loaded."""
    emptied = "packs a linear's weight once and empties the parameter, so that verl's load_weights has nothing to load into"
    once = "packs experts on the first load alone; verl's load_weights then puts plain rows where the kernel reads packed ones"
    flat = "takes a mask of pairs of places, and verl has one of places, as Transformer Engine takes it"
    return [
        Patch(f"{LINEARS}:dispatch_cpu_unquantized_gemm", _plain_linear, why=emptied, supported=SUPPORTED_VLLM),
        Patch(f"{EXPERTS}:CPUUnquantizedExperts.process_weights_after_loading", _not_packed, why=once, supported=SUPPORTED_VLLM),
        Patch(f"{EXPERTS}:cpu_fused_moe", _packed_when_used, why=once, stock="the kernel, and what is packed for it", supported=SUPPORTED_VLLM),
        Patch("megatron.core.transformer.dot_product_attention:DotProductAttention.forward", _causal, why=flat),
    ]


def _plain_linear(original: Callable[..., None]) -> Callable[..., None]:
    """The weight stays where it is, and torch multiplies by it: what vLLM does where it has nothing to pack."""

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm


def _not_packed(original: Callable[..., None]) -> Callable[..., None]:
    """Nothing is done to experts that the kernel takes without padding."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        width = self.moe_config.intermediate_size_per_partition
        if self._padded_intermediate_size(self.moe_config) != width:
            raise ValueError(
                f"experts of {width} rows per rank cannot be loaded again in the stock control; a multiple of {self._intermediate_alignment()} would work"
            )

    return process_weights_after_loading


def _packed_when_used(original: Callable[..., None]) -> Callable[..., None]:
    """``cpu_fused_moe`` given plain weights."""

    @functools.wraps(original)
    def cpu_fused_moe(out: torch.Tensor, inputs: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *rest: Any) -> None:
        from vllm._custom_ops import cpu_prepack_moe_weight

        isa = rest[5]  # after two biases, weights and ids of the chosen experts, and the activation
        original(out, inputs, cpu_prepack_moe_weight(w13, isa), cpu_prepack_moe_weight(w2, isa), *rest)

    return cpu_fused_moe


def _causal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Padding stands behind a row's tokens, so a causal mask hides it from them."""

    @functools.wraps(original)
    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = torch.ones(1, 1, len(query), len(key), dtype=torch.bool).triu_(1)
        return original(self, query, key, value, attention_mask, *rest, **options)

    return forward
