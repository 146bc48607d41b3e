"""Which platform vLLM runs on, as far as it decides between classes of ours. Imports nothing of a platform."""

from __future__ import annotations

import importlib.util

CPU_WORKER = "tio_megatron.integrations.vllm.worker.TioWorker"
ASCEND_WORKER = "tio_megatron.integrations.vllm.ascend.worker.TioNPUWorker"


def is_ascend() -> bool:
    """Whether vLLM has taken vllm-ascend's platform in this process."""
    if importlib.util.find_spec("vllm_ascend") is None:
        return False
    from vllm.platforms import current_platform

    return str(current_platform.device_type) == "npu"


def device() -> str:
    """The torch device type of the platform's tensors, as a contract's family names it."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def worker() -> str:
    """The worker class that switches the plug-in on by argument. Without vLLM (a client of a server elsewhere): the CPU's."""
    return ASCEND_WORKER if importlib.util.find_spec("vllm") is not None and is_ascend() else CPU_WORKER
