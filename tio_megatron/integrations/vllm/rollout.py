"""A rollout beside the ranks of a job: a vLLM engine in a child process, sampled from and given new weights by the process that started it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tio_megatron import kernels
from tio_megatron.checkpoint import CheckpointConfig, digest_differences
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout
from tio_megatron.jobs.children import Child
from tio_megatron.jobs.problems import InputProblem

CHUNK = 192
"""Tokens of one prefill step: longer prompts are cut, so chunked prefill is always part of a run."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to sample after it; ``temperature`` 0 is greedy."""

    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Sampled:
    """``tokens`` that a request was answered with and the log-probability of each, under the distribution sampled from.

    ``prompt`` has the log-probability of every token of the prompt but the first, ``rows`` the digest of the whole row of log-probabilities behind every
    one of these and of ``tokens``; both are empty unless they were asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    prompt: list[float]
    rows: list[bytes]


class Rollout:
    """A running vLLM engine in a child process.

    Args:
        layout: tensor parallel size, and whether experts are spread over the ranks.
        model: an HF folder.
        contract: the order of every sum, or None: stock vLLM.
        longest: tokens of the longest sequence.
        log: folder for what the engine prints.
        settings: further arguments of ``vllm.LLM``.

    Raises:
        InputProblem: the engine does not run the package's plug-in with this contract although it should.
    """

    def __init__(self, layout: RolloutLayout, model: Path, contract: Contract | None, *, longest: int, log: Path, **settings: Any) -> None:
        self.layout, self.contract = layout, contract
        self.fingerprint = ""
        config = CheckpointConfig.from_file(model / "config.json")
        text = contract.to_json() if contract else None
        name = f"{'' if contract else 'stock '}rollout {layout}"
        self._child = Child(name, "tio_megatron.integrations.vllm.rollout_process", log, _cpu_variables(layout, config.shape.hidden) | {"TIO_CONTRACT": text})
        try:
            options = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16, "dtype": config.dtype, "max_model_len": longest, **settings}
            started = self._child.ask("start", model=str(model), tp=layout.tp, expert_parallel=layout.expert_parallel, contract=text, **options)
            if contract is not None:
                self.fingerprint = require_same_contract(contract, kernels.version(contract.family), started.get("contract"))
        except BaseException:
            self._child.close(0.5)
            raise

    def sample(self, requests: Sequence[Request], *, stop: int | None = None, prompts: bool = False) -> list[Sampled]:
        """Answer all requests in one batch, each up to and with the token ``stop``. ``prompts``: also what the prompts' tokens get, and (with a contract)
        the digest of every row."""
        answer = self._child.ask("sample", requests=[dataclasses.asdict(request) for request in requests], stop=stop, prompts=prompts)
        return [Sampled(each["tokens"], each["logprobs"], each["prompt"], [bytes.fromhex(row) for row in each["rows"]]) for each in answer["samples"]]

    def update(self, weights: Path, digests: Mapping[str, str]) -> None:
        """Push an HF folder into the running engine, and require that it then holds exactly those bytes (a stock engine cannot be asked).

        Raises:
            RuntimeError: a tensor in the engine differs; names it.
        """
        answer = self._child.ask("update", weights=str(weights))
        differing = digest_differences(digests, answer["digests"]) if self.contract is not None else []
        if differing:
            raise RuntimeError(f"rollout {self.layout}: {len(differing)} tensors differ after the weights were pushed: {'; '.join(differing[:3])}")

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.close(15.0 if kind is None else 0.5)


def require_same_contract(contract: Contract, kernels: str, engine: Mapping[str, Any] | None) -> str:
    """The fingerprint both sides have.

    Args:
        contract: the trainer's.
        kernels: version of the trainer's kernels.
        engine: what the engine answered: ``contract`` (JSON), ``kernels``, ``fingerprint``; None when it has no plug-in.

    Raises:
        InputProblem: names the fields that differ.
    """
    ours = contract.fingerprint(kernels)
    if not engine:
        raise InputProblem("trainer has the plug-in, rollout has not: vLLM did not load it (is VLLM_PLUGINS set without tio_megatron?); switch it on in both")
    if engine.get("fingerprint") != ours:
        fields = contract.differences(Contract.from_json(json.dumps(engine["contract"])))
        if engine.get("kernels") != kernels:
            fields.append(f"kernels: {kernels} / {engine.get('kernels')}")
        raise InputProblem(f"trainer and rollout follow different contracts (trainer / rollout): {'; '.join(fields) or 'fingerprints differ'}")
    return ours


def _cpu_variables(layout: RolloutLayout, hidden: int) -> dict[str, str | None]:
    """Variables of the engine's process. Threads are not bound to cores: trainer and engine take turns on the same ones."""
    cores = len(os.sched_getaffinity(0))
    # A small model's products are too short to share: with two threads most of the time goes into waiting for each other.
    threads = max(1, cores // layout.tp) if hidden >= 1024 else 1
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",  # else stock vLLM compiles a rank counter for ten seconds
    }
