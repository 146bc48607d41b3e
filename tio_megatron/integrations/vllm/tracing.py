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
