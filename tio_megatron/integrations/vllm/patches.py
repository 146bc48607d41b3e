"""Every symbol of vLLM that is patched while the plug-in is on; each where no seam exists. Undone by :func:`.plugin.deactivate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch


def all_patches() -> tuple[Patch, ...]:
    """In the order of installation."""
    from tio_megatron.integrations.vllm import ending, platforms, refusing, sampler, workers

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
    table += [
        ("vllm.v1.executor.multiproc_executor:MultiprocExecutor.shutdown", ending.remember_killed, "afterwards the workers that vLLM ended look the same"),
        ("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model", workers.load_together, "every worker passes here once, its groups made"),
    ]
    if platforms.is_ascend():
        # Its model runner has a method of its own there, and generators that can be rewound.
        table = [row for row in table if row[1] is not sampler.rewind_generators]
    asked = (
        Patch(
            f"{workers.WORKER}.{method.__name__}",
            lambda stock, method=method: method,  # type: ignore[misc]
            "collective_rpc calls methods of the worker, whatever its class",
            may_be_absent=True,
            supported=releases.described("vllm"),
        )
        for method in workers.METHODS
    )
    return (*(Patch(target, build, why, supported=releases.described("vllm")) for target, build, why in table), *asked)
