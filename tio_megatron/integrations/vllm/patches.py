"""Every symbol of vLLM that is patched while the plug-in is on; each where no seam exists. Undone by :func:`.plugin.deactivate`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tio_megatron.integrations.patching import Patch
from tio_megatron.integrations.vllm import plugin, refusals
from tio_megatron.integrations.vllm.refusals import SUPPORTED

UPDATES = ("finish_weight_update", "reload_weights", "tio_load")
"""Worker methods after which the keys and values in the cache belong to older weights."""


@dataclass(frozen=True)
class VllmPatch(Patch):
    """A patch whose missing symbol means another vLLM."""

    def _moved(self, what: str) -> str:
        return f"{self.target} is not there ({what}): tio_megatron supports vllm {SUPPORTED['vllm']}; install that version"


def all_patches() -> tuple[Patch, ...]:
    """In the order of installation."""
    from tio_megatron.integrations.vllm import sampler

    table: list[tuple[str, Callable[[Any], Any], str]] = [
        (
            "vllm.v1.sample.sampler:Sampler.compute_logprobs",
            lambda stock: staticmethod(sampler.compute_logprobs),
            "raw log-probabilities of sampled and prompt tokens, and those of greedy steps in processed mode",
        ),
        ("vllm.v1.sample.sampler:Sampler.__init__", sampler.keep_processed_logits, "processed mode asks for logits, not for torch's log-softmax"),
        ("vllm.v1.sample.sampler:Sampler.sample", sampler.finish_processed, "processed log-probabilities"),
        ("vllm.v1.sample.sampler:Sampler.forward", sampler.remember_generators, "seeded requests in chunked prompts"),
        (
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
            sampler.rewind_generators,
            "stock rewinds a generator in a way that only accelerators have",
        ),
        (
            "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
            _refuse_early,
            "refusals where the user starts the engine, not deep in a worker",
        ),
        ("vllm.v1.engine.core:EngineCore.collective_rpc", _reset_prefix_cache, "the prefix cache lives beside the scheduler, where no worker reaches"),
    ]
    return tuple(VllmPatch(target, build, why) for target, build, why in table)


def _refuse_early(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def verify(self: Any) -> None:
        stock(self)
        if self.model_config is not None:
            refusals.check(self, plugin.active())

    return verify


def _reset_prefix_cache(stock: Callable[..., Any]) -> Callable[..., Any]:
    # vLLM reads the signature when the call comes from another process.
    @functools.wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, method, *args, **kwargs)
        if method in UPDATES and not self.reset_prefix_cache(reset_running_requests=True):
            raise ValueError(f"{method}: the prefix cache could not be reset; its keys and values belong to older weights")
        return result

    return collective_rpc
