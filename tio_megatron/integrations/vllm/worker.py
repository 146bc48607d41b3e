"""The worker class of a CPU that switches the plug-in on by argument."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tio_megatron.integrations.vllm.extension import WorkerExtension, switch_on

__all__ = ["TioWorker", "WorkerExtension"]


class TioWorker(CPUWorker, WorkerExtension):
    """vLLM's CPU worker with the contract of ``additional_config["tio_contract"]`` in force."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        switch_on(type(self), vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
