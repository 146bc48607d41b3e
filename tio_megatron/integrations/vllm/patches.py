"""Every symbol of vLLM that is patched while the plug-in is on; each where no seam exists. Undone by :func:`.plugin.deactivate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tio_megatron.integrations.patching import Patch
from tio_megatron.integrations.vllm.refusals import SUPPORTED


@dataclass(frozen=True)
class VllmPatch(Patch):
    """A patch whose missing symbol means another vLLM."""

    def _moved(self, what: str) -> str:
        return f"{self.target} is not there ({what}): tio_megatron supports vllm {SUPPORTED['vllm']}; install that version"


def all_patches() -> tuple[Patch, ...]:
    """In the order of installation."""
    from tio_megatron.integrations.vllm import platforms, refusing, sampler, workers

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
        ("vllm.v1.engine.core:EngineCore.collective_rpc", refusing.watch_weights, "the prefix cache and the requests are the core's, where no worker reaches"),
        ("vllm.v1.engine.core:EngineCore.step", refusing.refuse_requests, "requests while weights are half loaded; in the model they would end the engine"),
    ]
    table.append(
        ("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model", workers.load_together, "every worker passes here once, its groups made")
    )
    if platforms.is_ascend():
        # Its model runner has a method of its own there, and generators that can be rewound.
        table = [row for row in table if row[1] is not sampler.rewind_generators]
    asked = (
        VllmPatch(
            f"{workers.WORKER}.{method.__name__}",
            lambda stock, method=method: method,  # type: ignore[misc]
            "collective_rpc calls methods of the worker, whatever its class",
            may_be_absent=True,
        )
        for method in workers.METHODS
    )
    return (*(VllmPatch(target, build, why) for target, build, why in table), *asked)


def front_patches() -> tuple[Patch, ...]:
    """Those of the process that starts an engine: they do nothing for engines without a contract."""
    from tio_megatron.integrations.vllm import front, refusing

    table: list[tuple[str, Callable[[Any], Any], str]] = [
        ("vllm.engine.arg_utils:EngineArgs.create_engine_config", front.refuse_early, "refusals where the user starts the engine, not deep in a worker"),
        ("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", refusing.raise_refusals, "the reason of a refused request, as an exception"),
    ]
    return tuple(VllmPatch(target, build, why) for target, build, why in table)
