"""The parent's side of a rollout engine: start it in a layout, sample, push weights, ask for its contract."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from examples.qwen3_moe.children import Child
from examples.qwen3_moe.ending import InputProblem
from examples.qwen3_moe.prompts import Request
from tio_megatron.checkpoint import digest_differences
from tio_megatron.contract import Contract
from tio_megatron.contract.words import RolloutLayout
from tio_megatron.verify import Recording

CHUNK = 192
"""Tokens of one prefill step: longer prompts are cut, so chunked prefill is always part of the run."""


class Rollout:
    """A running vLLM engine in a child process. ``contract`` None is stock vLLM; ``settings`` are passed to ``rollout_child.start``.

    Raises:
        InputProblem: the engine does not run the package's plug-in although it should.
    """

    def __init__(
        self,
        layout: RolloutLayout,
        model: Path,
        dtype: str,
        contract: Contract | None,
        *,
        longest: int,
        log: Path,
        environment: Mapping[str, str | None],
        **settings: Any,
    ) -> None:
        self.layout = layout
        self.contract = contract
        name = f"{'' if contract else 'stock '}rollout {layout}"
        variables = {"TIO_CONTRACT": contract.to_json() if contract else None, **environment}
        self._child = Child(name, "examples.qwen3_moe.rollout_child", log, variables)
        try:
            self.started = self._child.ask(
                "start",
                model=str(model),
                dtype=dtype,
                tp=layout.tp,
                expert_parallel=layout.expert_parallel,
                contract=contract.to_json() if contract else None,
                max_model_len=longest,
                **{"max_num_batched_tokens": CHUNK, "max_num_seqs": 16, **settings},
            )
        except BaseException:
            self._child.close(0.5)
            raise

    def generate(self, requests: Sequence[Request], out: Path) -> Recording:
        """Sample all requests in one batch."""
        self._child.ask("generate", requests=[dataclasses.asdict(request) for request in requests], out=str(out))
        return Recording.load(out)

    def sample(self, requests: Sequence[Request], stop: int) -> list[tuple[list[int], list[float]]]:
        """New tokens of each request, up to and with the token ``stop``, and their log-probabilities under the distribution sampled from."""
        answer = self._child.ask("sample", requests=[dataclasses.asdict(request) for request in requests], stop=stop)
        return [(tokens, logprobs) for tokens, logprobs in answer["samples"]]

    def update(self, weights: Path, digests: Mapping[str, str]) -> None:
        """Push an HF folder into the running engine, and require that it then holds exactly those bytes (a stock engine cannot be asked).

        Raises:
            RuntimeError: a tensor in the engine differs; names it.
        """
        answer = self._child.ask("update", weights=str(weights))
        differing = digest_differences(digests, answer["digests"]) if self.contract is not None else []
        if differing:
            raise RuntimeError(f"rollout {self.layout}: {len(differing)} tensors differ after the weights were pushed: {'; '.join(differing[:3])}")

    def close(self, patience: float = 15.0) -> None:
        """End the engine; after ``patience`` seconds without asking."""
        self._child.close(patience)

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(15.0 if kind is None else 0.5)


def require_same_contract(contract: Contract, kernels: str, engine: Mapping[str, Any] | None) -> str:
    """The fingerprint both sides have.

    Args:
        contract: the trainer's.
        kernels: version of the trainer's kernels.
        engine: what the engine said: ``contract`` (JSON), ``kernels``, ``fingerprint``; None when it has no plug-in.

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
