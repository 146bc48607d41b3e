"""vLLM's own names for an engine that is only looked at."""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams


def engine(model: str, **options: Any) -> Any:
    """An ``LLM``."""
    return LLM(model=model, **options)


def prompt_logprobs(llm: Any, tokens: list[int], count: int) -> list[dict[int, float]]:
    """For each token of a prompt {token id: log-probability} of itself and ``count`` others (-1: all); empty for the first, which has none."""
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=count, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
    return [{token: entry.logprob for token, entry in (row or {}).items()} for row in answer.prompt_logprobs]
