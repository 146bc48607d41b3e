"""Log-probabilities in the contract's order, in every mode of vLLM's sampler; and a recorder of whole rows for verification.

The sampler has no registry, so three of its methods are patched (:mod:`.patches`). vLLM's modes: ``raw_logprobs`` are of the model's logits;
``processed_logprobs`` are of the logits after temperature, penalties, top-k and top-p, for sampled tokens only (prompt tokens are raw).

Shapes: R requests of a step, V true vocabulary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tio_megatron.checkpoint import row_digests
from tio_megatron.contract import VocabOrder
from tio_megatron.integrations.vllm import in_force
from tio_megatron.kernels.logprob import log_softmax

PROCESSED = "processed_logprobs"


@lru_cache(maxsize=16)
def _order(contract: Any, vocab: int) -> VocabOrder:
    return contract.vocab_order(vocab)


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` [R, V] fp32 of the true vocabulary -> log-probabilities [R, V] fp32.

    Raises:
        ValueError: logits of another type; they come from a head that is not ours.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"log-probabilities need fp32 logits, got {logits.dtype}: the model's head is not tio_megatron's")
    return log_softmax(logits, _order(in_force.active(), logits.shape[-1]))


def keep_processed_logits(stock: Callable[..., None]) -> Callable[..., None]:
    """``Sampler.__init__``: in processed mode the top-k/top-p sampler hands back its logits, so that no log-softmax of torch's is made."""

    @functools.wraps(stock)
    def init(self: Any, logprobs_mode: str = "raw_logprobs", *args: Any, **kwargs: Any) -> None:
        stock(self, logprobs_mode, *args, **kwargs)
        if logprobs_mode == PROCESSED:
            self.topk_topp_sampler.logprobs_mode = "processed_logits"

    return init


def finish_processed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Sampler.sample``: turns the processed logits into log-probabilities. An all-greedy step has done so by ``compute_logprobs``."""

    @functools.wraps(stock)
    def sample(self: Any, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: str | None = None) -> Any:
        sampled, processed = stock(self, logits, sampling_metadata, logprobs_mode_override)
        if processed is not None and (logprobs_mode_override or self.logprobs_mode) == PROCESSED and not sampling_metadata.all_greedy:
            processed = compute_logprobs(processed)
        return sampled, processed

    return sample


def remember_generators(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Sampler.forward``: notes each seeded request's generator, for :func:`rewind_generators`."""

    @functools.wraps(stock)
    def forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        self.states_before = {row: generator.get_state() for row, generator in sampling_metadata.generators.items()}
        return stock(self, logits, sampling_metadata, *args, **kwargs)

    return forward


def rewind_generators(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``CPUModelRunner._bookkeeping_sync``: a chunk of a prompt samples a token that is thrown away, and its draw must not count.

    Stock rewinds with ``Generator.set_offset``, which a CPU generator lacks: a seeded request in a chunked prompt ends the engine.
    """

    @functools.wraps(stock)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        thrown = [row for row in batch.generators if row < batch.num_reqs and bool(self.discard_request_mask.np[row])]
        if not thrown:
            return stock(self, *args, **kwargs)
        kept = dict(batch.generators)
        for row in thrown:
            batch.generators.pop(row).set_state(self.sampler.states_before[row])
        try:
            return stock(self, *args, **kwargs)
        finally:
            batch.generators.clear()
            batch.generators.update(kept)

    return bookkeeping


class RowRecorder:
    """Digests of whole rows of log-probabilities: the row at position p of a request is that of its p-th token (from 0) given those before.

    Args:
        runner: the worker's model runner.
        prompts: record the prompt's rows as well (computes the head for every prompt position that is not read from the prefix cache).
    """

    def __init__(self, runner: Any, prompts: bool) -> None:
        self.rows: list[tuple[str, int, int, bytes]] = []
        self._runner, self._prompts = runner, prompts
        self._sampler_forward, self._prompt_logprobs = runner.sampler.forward, runner._get_prompt_logprobs_dict
        runner.sampler.forward = self._sampled
        runner._get_prompt_logprobs_dict = self._prompt

    def stop(self) -> None:
        """Take the hooks away."""
        del self._runner.sampler.forward
        del self._runner._get_prompt_logprobs_dict

    def _sampled(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        # Before sampling: it works on the logits in place.
        digests = row_digests(compute_logprobs(logits))
        output = self._sampler_forward(logits, sampling_metadata, *args, **kwargs)
        runner, batch = self._runner, self._runner.input_batch
        for row in range(batch.num_reqs):
            if not bool(runner.discard_request_mask.np[row]):
                token = int(output.sampled_token_ids[row, 0])
                self.rows.append((_external(batch.req_ids[row]), int(batch.num_tokens_no_spec[row]), token, digests[row]))
        return output

    def _prompt(self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        if self._prompts:
            for name, count in num_scheduled_tokens.items():
                self._record_prompt(name, count, hidden_states)
        return self._prompt_logprobs(hidden_states, num_scheduled_tokens)

    def _record_prompt(self, name: str, count: int, hidden_states: torch.Tensor) -> None:
        runner = self._runner
        request = runner.requests[name]
        start, tokens = request.num_computed_tokens, request.prompt_token_ids
        count = min(count, len(tokens) - 1 - start)
        if count <= 0:
            return
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        logits = runner.model.compute_logits(hidden_states[offset : offset + count])
        for step, digest in enumerate(row_digests(compute_logprobs(logits)), start=start + 1):
            self.rows.append((_external(name), step, int(tokens[step]), digest))


def _external(name: str) -> str:
    """The request id that the caller knows: vLLM appends eight random hex digits."""
    return re.sub(r"-[0-9a-f]{8}$", "", name)
