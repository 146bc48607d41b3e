"""vLLM's own names for an engine that is only looked at."""

from __future__ import annotations

from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size


def engine(model: str, **options: Any) -> Any:
    """An ``LLM``."""
    return LLM(model=model, **options)


def prompt_logprobs(llm: Any, tokens: list[int], count: int) -> list[dict[int, float]]:
    """For each token of a prompt {token id: log-probability} of itself and ``count`` others (-1: all); empty for the first, which has none."""
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
    return [{token: entry.logprob for token, entry in (row or {}).items()} for row in answer.prompt_logprobs]


def place() -> tuple[int, int]:
    """(rank, ranks) of this worker's tensor-parallel group."""
    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def require_whole_heads(kv_heads: int, ranks: int) -> None:
    """Refuse layouts whose ranks hold copies of key/value heads.

    Raises:
        ValueError: there are not as many for every rank.
    """
    if kv_heads % ranks:
        raise ValueError(f"record: {ranks} tensor-parallel ranks for {kv_heads} key/value heads; use at most as many ranks as heads")


def stock_experts(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Stock's own operator of a layer's experts: ``x`` [n, H], ``weights`` and ``ids`` [n, k] -> this rank's weighted sum [n, H]."""
    out: torch.Tensor = layer.quant_method.apply(layer=layer, x=x, topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None)
    return out


def stock_activations(layer: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """What stock's operator multiplies by the down projection: ``x`` [n, H], ``ids`` [n, 1] -> [n, I]; None where its weights are packed in a way not
    known here (anything but vLLM's own CPU kernels, which hold them as the processor's instructions want).

    The same operator runs with unit rows for down projections, so that each of its output columns is one activation times 1: a sum of one term, exact.
    """
    kernel = layer.quant_method.moe_kernel
    isa = getattr(kernel.fused_experts, "isa", None)
    if isa is None or getattr(kernel.fused_experts, "_use_zentorch", False):
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight

    experts, hidden, held = layer.w2_weight.shape
    width = kernel.fused_experts.moe_config.intermediate_size_per_partition
    one, found = torch.ones(len(x), 1, dtype=torch.float32), []
    for first in range(0, width, hidden):
        count = min(hidden, width - first)
        unit = torch.zeros(experts, hidden, held, dtype=layer.w2_weight.dtype)
        unit[:, torch.arange(count), first + torch.arange(count)] = 1
        out = kernel.apply(
            hidden_states=x.clone(),
            w1=layer.w13_weight,
            w2=cpu_prepack_moe_weight(unit, isa),
            topk_weights=one,
            topk_ids=ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=None,
            shared_experts_input=None,
        )
        found.append(out[:, :count].clone())
    return torch.cat(found, dim=1)
