"""An engine and its teacher side by side."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.vllm.checkpoints import VOCABULARY
from tests.integrations.vllm.teacher import Teacher
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.contract import Contract
from tio_megatron.integrations.vllm import engine_options, plugin, push_weights
from tio_megatron.testing import assert_same_bytes

# Before vLLM is imported: engines in this process unless a test says otherwise.
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # Stock compiles a function that counts ranks of tokens: ten seconds for nothing.
    "TORCHDYNAMO_DISABLE": "1",
}.items():
    os.environ.setdefault(name, value)

LENGTHS = (1, 5, 64, 65, 150, 300)
"""Prompt lengths: one token, around a block of 64 keys, several chunks of 96."""

_ALIVE: list[Any] = []
"""Every engine: when one whose core lives in this process is collected, it takes the process groups of all others with it."""


@dataclass
class Scored:
    """One request's answer. ``sampled`` [n] and ``prompted`` [len(prompt) - 1] are fp32 log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    sampled: torch.Tensor
    prompted: torch.Tensor | None
    cached: int

    @property
    def whole(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.tokens


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


class Engine:
    """A running ``LLM`` and teachers of the checkpoints it may hold."""

    def __init__(self, llm: Any, folder: Path, contract: Contract) -> None:
        self.llm, self.folder, self.contract = llm, folder, contract
        self.second: Path | None = None
        self.plants: list[str] = []
        self._teachers: dict[Path, Teacher] = {}

    @classmethod
    @contextlib.contextmanager
    def start(cls, folder: Path, contract: Contract | None = None, *, on: str = "argument", **options: Any) -> Iterator[Engine]:
        """An engine on ``folder``, switched ``on`` by ``argument``, ``environment`` or not (``off``: stock); ended at the end of the block."""
        from vllm import LLM

        contract = contract or Contract()
        common = dict(
            model=str(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=1024,
            block_size=64,
            max_num_seqs=8,
            max_logprobs=-1,
            seed=0,
            enable_prefix_caching=False,
            num_gpu_blocks_override=48,
        )
        from vllm import envs

        was_active = plugin.is_active()
        # Every engine freezes the environment for its process.
        envs.disable_envs_cache()
        with pytest.MonkeyPatch.context() as patch:
            if on == "argument":
                ours = {"tensor_parallel_size": "tp", "enable_expert_parallel": "expert_parallel"}
                chosen = engine_options(contract, **{ours.get(name, name): value for name, value in (common | options).items()})
            else:
                chosen = common | dict(enforce_eager=True) | options
            if on == "environment":
                # vLLM has called the entry point of this process already; the workers' are still to come.
                patch.setenv("TIO_CONTRACT", contract.to_json())
                plugin.activate(contract)
                chosen["weight_transfer_config"] = dict(backend="tio")
            elif on == "off":
                plugin.deactivate()
            try:
                llm = LLM(**chosen)
                _ALIVE.append(llm)
                yield cls(llm, folder, contract)
                core = llm.llm_engine.engine_core
                if not hasattr(core, "engine_core"):
                    core.shutdown()
                elif chosen.get("distributed_executor_backend") == "mp":
                    core.engine_core.model_executor.shutdown()
            finally:
                if was_active:
                    plugin.activate(contract)

    def teacher(self, folder: Path | None = None) -> Teacher:
        """The teacher of a checkpoint (the engine's own by default)."""
        folder = folder or self.folder
        if folder not in self._teachers:
            self._teachers[folder] = Teacher(folder, self.contract)
        return self._teachers[folder]

    def generate(
        self, asked: Sequence[list[int]], tokens: int = 6, *, prompted: bool = True, single: bool = False, each: Sequence[dict[str, Any]] | None = None
    ) -> list[Scored]:
        """Answers to ``asked`` in one batch (or one after another); greedy unless ``each`` says otherwise for its request."""
        from vllm import SamplingParams

        common = dict(temperature=0.0, max_tokens=tokens, logprobs=0, prompt_logprobs=0 if prompted else None, ignore_eos=True, detokenize=False)
        chosen = [SamplingParams(**common | own) for own in each or [{}] * len(asked)]
        requests = [dict(prompt_token_ids=prompt) for prompt in asked]
        if single:
            answers = [self.llm.generate([request], [one], use_tqdm=False)[0] for request, one in zip(requests, chosen, strict=True)]
        else:
            answers = self.llm.generate(requests, chosen, use_tqdm=False)
        return [scored(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]

    def check(self, scored: Sequence[Scored], teacher: Teacher | None = None, temperature: float = 1.0, what: str = "") -> int:
        """Every returned log-probability has the teacher's bytes; returns how many there were."""
        teacher = teacher or self.teacher()
        count = 0
        for number, one in enumerate(scored):
            rows = teacher.logprobs(one.whole)
            name = f"{what} request {number} ({len(one.prompt)} tokens)"
            if one.prompted is not None and len(one.prompt) > 1:
                assert_same_bytes(one.prompted, _pick(rows, one.whole, 1, len(one.prompt)), name + " prompt")
                count += len(one.prompted)
            if temperature != 1.0:
                rows = teacher.logprobs(one.whole, temperature)
            assert_same_bytes(one.sampled, _pick(rows, one.whole, len(one.prompt), len(one.whole)), name + " sampled")
            count += len(one.sampled)
        return count

    def drawn(self, prompt: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
        """The tokens that vLLM's sampler draws from the teacher's logits."""
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        generator, whole = torch.Generator().manual_seed(seed), list(prompt)
        for _ in range(tokens):
            draw = torch.randint(0, 2**31, (1,), generator=generator)
            whole.append(int(torch.ops._C.fused_gumbel_argmax(self.teacher().logits(whole)[-1:] / temperature, draw)))
        return whole[len(prompt) :]

    def picked(self, one: Scored) -> torch.Tensor:
        """The teacher's log-probabilities of a request's sampled tokens."""
        return _pick(self.teacher().logprobs(one.whole), one.whole, len(one.prompt), len(one.whole))

    def worker(self) -> Any:
        """The worker of an engine of one process."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def model(self) -> Any:
        """Its model."""
        return self.worker().model_runner.get_model()

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A worker method's answer on the first rank."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)[0]


def broken_off(tensors: Iterable[tuple[str, torch.Tensor]], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The first ``count`` of ``tensors``, then the trainer fails."""
    yield from itertools.islice(tensors, count)
    raise KeyError("the trainer failed")


@contextlib.contextmanager
def one_refusal_a_step(llm: Any) -> Iterator[None]:
    """Of several answers that the core gives at once the front end gets one now and the others in later steps: so they may come from another process."""
    core, waiting = llm.llm_engine.engine_core, []
    stock = core.get_output

    def get_output() -> Any:
        if waiting:
            return waiting.pop(0)
        found = stock()
        for one in found.outputs[1:]:
            part = copy.copy(found)
            part.outputs = [one]
            waiting.append(part)
        found.outputs = found.outputs[:1]
        return found

    core.get_output = get_output
    try:
        yield
    finally:
        core.get_output = stock
        for part in waiting:  # still on their way when the next call comes
            llm.llm_engine.output_processor.process_outputs(part.outputs)


def aborted_push_and_back(engine: Engine, folder: Path) -> None:
    """Half of ``folder`` is pushed: requests are refused with the reason, twice, and the engine lives; all of it is pushed: right bytes."""
    asked = prompts((5, 150), seed=21)
    with pytest.raises(KeyError):
        push_weights(engine.llm, broken_off(Checkpoint(folder).tensors(), 20), engine.contract, bucket_bytes=100_000)
    for _ in range(2):
        with one_refusal_a_step(engine.llm), pytest.raises(ValueError, match="weights are not whole: an update of the weights was aborted; load all"):
            engine.generate(asked)
    push_weights(engine.llm, Checkpoint(folder).tensors(), engine.contract, bucket_bytes=100_000)
    engine.check(engine.generate(asked), engine.teacher(folder), what="after an aborted push")


def _pick(rows: torch.Tensor, tokens: list[int], start: int, stop: int) -> torch.Tensor:
    """The log-probabilities of ``tokens[start:stop]``."""
    at = torch.arange(start, stop)
    return rows[at - 1, torch.tensor(tokens)[at]]


def scored(prompt: list[int], answer: Any) -> Scored:
    """vLLM's answer to one request."""
    tokens = list(answer.outputs[0].token_ids)
    sampled = torch.tensor([row[token].logprob for row, token in zip(answer.outputs[0].logprobs, tokens, strict=True)])
    prompted = None
    if answer.prompt_logprobs is not None:
        prompted = torch.tensor([row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)])
    return Scored(prompt, tokens, sampled, prompted, answer.num_cached_tokens or 0)
