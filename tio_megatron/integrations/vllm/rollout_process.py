"""The child process of :class:`~tio_megatron.integrations.vllm.rollout.Rollout`: one engine, stock or with the package's plug-in."""

from __future__ import annotations

import os
from typing import Any

from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract
from tio_megatron.integrations.vllm import engine_options, push_weights, rollout_contract
from tio_megatron.integrations.vllm.ending import leaving_no_files, remove_files
from tio_megatron.jobs.children import serve
from tio_megatron.jobs.problems import InputProblem

_engine: Any = None
_contract: Contract | None = None


class StockWorker:
    """What a worker of stock vLLM is asked for beside vLLM's own methods, by ``collective_rpc``."""

    def pack_experts(self) -> None:
        """Stock vLLM on the CPU packs experts when it loads them, but on a reload copies them unpacked over the packed ones: pack them again."""
        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)


def start(model: str, tp: int, expert_parallel: bool, contract: str | None, **more: Any) -> dict[str, Any]:
    """Start the engine; ``contract`` None is stock vLLM. ``more``: further arguments of ``vllm.LLM``. Answers with the contract that the engine follows."""
    global _engine, _contract
    _contract = Contract.from_json(contract) if contract is not None else None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler in this process; only the ranks of TP are further ones
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
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
        options["worker_extension_cls"] = "tio_megatron.integrations.vllm.rollout_process.StockWorker"  # a name: functions would travel as pickles
    from vllm import LLM

    with leaving_no_files():
        _engine = LLM(model=model, **options)
    if _contract is None:
        return {}
    try:
        return {"contract": rollout_contract(_engine)}
    except ValueError as error:
        raise InputProblem(f"trainer and rollout must both have the plug-in: {error}") from error


def sample(requests: list[dict[str, Any]], stop: int | None, prompts: bool) -> dict[str, Any]:
    """Answer every request in one batch, as ``Rollout.sample`` says."""
    from vllm import SamplingParams

    # By the token that is given the end is found, whatever the checkpoint's configuration says.
    more: dict[str, Any] = ({"stop_token_ids": [stop]} if stop is not None else {}) | ({"prompt_logprobs": 0} if prompts else {})
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
    recorded = prompts and _contract is not None
    if recorded:
        _engine.collective_rpc("tio_record", kwargs={"on": True, "prompts": True})
    outputs = _engine.generate([{"prompt_token_ids": request["tokens"]} for request in requests], parameters, use_tqdm=False)
    samples = []
    for request, output in zip(requests, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        given = zip(output.prompt_logprobs[1:], request["tokens"][1:], strict=True) if prompts else ()
        samples.append({"tokens": tokens, "logprobs": logprobs, "prompt": [entry[token].logprob for entry, token in given], "rows": []})
    if recorded:
        sequences = [[*request["tokens"], *each["tokens"]] for request, each in zip(requests, samples, strict=True)]
        for each, rows in zip(samples, _rows([output.request_id for output in outputs], sequences), strict=True):
            each["rows"] = [row.hex() for row in rows]
    return {"samples": samples}


def _rows(names: list[str], tokens: list[list[int]]) -> list[list[bytes]]:
    """The recorded digest of the row behind every token that has a predecessor."""
    found: dict[tuple[str, int], bytes] = {}
    for name, position, token, digest in _engine.collective_rpc("tio_rows")[0]:
        if found.setdefault((name, position), digest) != digest:
            raise RuntimeError(f"request {name}, position {position}: a row computed twice has two digests")
        if name in names and token != tokens[names.index(name)][position]:
            raise RuntimeError(f"request {name}, position {position}: the row is of token {token}, {tokens[names.index(name)][position]} was sampled")
    return [[found[name, position] for position in range(1, len(sequence))] for name, sequence in zip(names, tokens, strict=True)]


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
    remove_files()  # the process ends without its exit functions


if __name__ == "__main__":
    serve({"start": start, "sample": sample, "update": update}, finish)
