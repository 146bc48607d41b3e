"""The worker class of an NPU that switches the plug-in on by argument. *Built, not run.*"""

from __future__ import annotations

from typing import Any

from vllm_ascend.worker.worker import NPUWorker

from tio_megatron.integrations.vllm.ascend.pages import joined
from tio_megatron.integrations.vllm.extension import WorkerExtension, switch_on


class TioNPUWorker(NPUWorker, WorkerExtension):
    """vllm-ascend's worker with the contract of ``additional_config["tio_contract"]`` in force."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        switch_on(type(self), vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """vllm-ascend's; then the model runner is told how to allocate pages."""
        super().init_device()
        self.model_runner._allocate_kv_cache_tensors = joined(self.model_runner._allocate_kv_cache_tensors)
