"""Child process: one vLLM engine in one layout, started once for all rounds. Stock, or with the package's plug-in."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from examples.qwen3_moe.children import serve
from tio_megatron.verify import Recording

_engine: Any = None
_ours = False


def start(
    model: str, dtype: str, tp: int, expert_parallel: bool, contract: str | None, max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int
) -> dict[str, Any]:
    """Start the engine; ``contract`` None is stock vLLM. Answers with what the engine says about its contract."""
    global _engine, _ours
    _ours = contract is not None
    if tp == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = time.monotonic()
    options: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "tensor_parallel_size": tp,
        "enable_expert_parallel": expert_parallel,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "enable_chunked_prefill": True,
        "max_logprobs": -1,
        "seed": 0,
        "disable_log_stats": True,
    }
    if tp > 1:
        options["distributed_executor_backend"] = "mp"
    if _ours:
        from tio_megatron.contract import Contract
        from tio_megatron.integrations.vllm import engine_options

        options |= engine_options(Contract.from_json(contract))  # type: ignore[arg-type]
    from vllm import LLM

    _engine = LLM(**options)
    answer: dict[str, Any] = {"seconds": time.monotonic() - began}
    if _ours:
        answer["contract"] = _engine.collective_rpc("tio_contract")[0]
    return answer


def generate(requests: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """Sample every request in one batch and save the recording, prompts' log-probabilities included."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_new_tokens"],
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    began = time.monotonic()
    outputs = _engine.generate([{"prompt_token_ids": request["tokens"]} for request in requests], parameters, use_tqdm=False)
    tokens, logprobs = [], []
    for request, output in zip(requests, outputs, strict=True):
        sampled = list(output.outputs[0].token_ids)
        tokens.append([*request["tokens"], *sampled])
        prompt = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], request["tokens"][1:], strict=True)]
        logprobs.append([*prompt, *[entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, sampled, strict=True)]])
    Recording.of(tokens, [len(request["tokens"]) for request in requests], logprobs, None).save(Path(out))
    return {"seconds": time.monotonic() - began, "tokens": sum(len(entry) for entry in logprobs)}


if __name__ == "__main__":
    sys.exit(serve({"start": start, "generate": generate}))
