"""Child process: one vLLM engine in one layout, started once for all rounds. Stock, or with the package's plug-in."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from examples.qwen3_moe.children import serve
from examples.qwen3_moe.ending import InputProblem
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract
from tio_megatron.integrations.vllm import engine_options, push_weights, rollout_contract
from tio_megatron.integrations.vllm.ending import leaving_no_files
from tio_megatron.verify import Recording

_engine: Any = None
_contract: Contract | None = None


def start(
    model: str,
    dtype: str,
    tp: int,
    expert_parallel: bool,
    contract: str | None,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    rows: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Start the engine; ``contract`` None is stock vLLM. Answers with what the engine says about its contract.

    ``rows``: record a digest of every row of log-probabilities, for :func:`generate`. ``more``: further arguments of ``vllm.LLM``.
    """
    global _engine, _contract
    _contract = Contract.from_json(contract) if contract is not None else None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler in this process; only the ranks of TP are further ones
    began = time.monotonic()
    options: dict[str, Any] = {
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "block_size": 64,
        "enable_chunked_prefill": True,
        "max_logprobs": -1,
        "seed": 0,
        "disable_log_stats": True,
        **more,
    }
    if _contract is not None:
        options = engine_options(_contract, tp=tp, expert_parallel=expert_parallel, **options)
    else:
        options |= {"tensor_parallel_size": tp, "enable_expert_parallel": expert_parallel, "enforce_eager": True}
        options |= {"distributed_executor_backend": "mp"} if tp > 1 else {}
        options["worker_extension_cls"] = "examples.qwen3_moe.stock_worker.StockWorker"  # a name: functions would travel as pickles
    from vllm import LLM

    with leaving_no_files():
        _engine = LLM(model=model, **options)
    answer: dict[str, Any] = {"seconds": time.monotonic() - began}
    if _contract is not None:
        try:
            answer["contract"] = rollout_contract(_engine)
        except ValueError as error:
            raise InputProblem(f"trainer and rollout must both have the plug-in: {error}") from error
        if rows:
            _engine.collective_rpc("tio_record", kwargs={"on": True, "prompts": True})
    return answer


def _sampled(requests: list[dict[str, Any]], **more: Any) -> list[Any]:
    """vLLM's outputs for every request, sampled in one batch; ``more`` of ``SamplingParams``."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_new_tokens"],
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            **more,
        )
        for request in requests
    ]
    found: list[Any] = _engine.generate([{"prompt_token_ids": request["tokens"]} for request in requests], parameters, use_tqdm=False)
    return found


def generate(requests: list[dict[str, Any]], out: str) -> dict[str, Any]:
    """Sample every request in one batch and save the recording, prompts' log-probabilities included."""
    began = time.monotonic()
    outputs = _sampled(requests, prompt_logprobs=0)
    tokens, logprobs = [], []
    for request, output in zip(requests, outputs, strict=True):
        sampled = list(output.outputs[0].token_ids)
        tokens.append([*request["tokens"], *sampled])
        prompt = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], request["tokens"][1:], strict=True)]
        logprobs.append([*prompt, *[entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, sampled, strict=True)]])
    rows = _rows([output.request_id for output in outputs], tokens) if _contract is not None else None
    Recording.of(tokens, [len(request["tokens"]) for request in requests], logprobs, rows).save(Path(out))
    return {"seconds": time.monotonic() - began, "tokens": sum(len(entry) for entry in logprobs)}


def _rows(names: list[str], tokens: list[list[int]]) -> list[list[bytes]]:
    """The recorded digest of the row behind every token that has a predecessor."""
    found: dict[tuple[str, int], bytes] = {}
    for name, position, token, digest in _engine.collective_rpc("tio_rows")[0]:
        if found.setdefault((name, position), digest) != digest:
            raise RuntimeError(f"request {name}, position {position}: a row computed twice has two digests")
        if name in names and token != tokens[names.index(name)][position]:
            raise RuntimeError(f"request {name}, position {position}: the row is of token {token}, {tokens[names.index(name)][position]} was sampled")
    return [[found[name, position] for position in range(1, len(sequence))] for name, sequence in zip(names, tokens, strict=True)]


def sample(requests: list[dict[str, Any]], stop: int) -> dict[str, Any]:
    """Sample every request in one batch; answers with each one's new tokens, ``stop`` included, and their log-probabilities."""
    outputs = _sampled(requests, stop_token_ids=[stop])  # by which the checkpoint's end token is found, whatever its configuration says
    samples = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        samples.append((tokens, [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]))
    return {"samples": samples}


def update(weights: str) -> dict[str, Any]:
    """Push an HF folder into the running engine; answers with the digests of what it then holds (a stock engine knows none)."""
    if _contract is None:
        _engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        _engine.collective_rpc("pack_experts")
        _engine.reset_prefix_cache()
        return {"digests": {}}
    with Checkpoint(weights) as checkpoint:
        push_weights(_engine, checkpoint.tensors(), _contract)
    return {"digests": _engine.collective_rpc("tio_digests")[0]}


def finish() -> None:
    """Let vLLM end its own processes."""
    if _engine is not None:
        core = _engine.llm_engine.engine_core
        core.engine_core.model_executor.shutdown()


if __name__ == "__main__":
    serve({"start": start, "generate": generate, "sample": sample, "update": update}, finish)
