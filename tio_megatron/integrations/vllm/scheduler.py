"""vLLM's scheduler, named by :func:`.options.engine_options`: it switches the plug-in on in the process of the engine's core.

With several ranks that process loads no worker class, and without the environment variable it would not know of the contract; what it must do
is in :mod:`.refusing`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tio_megatron.contract.environment import read
from tio_megatron.integrations.vllm import front, plugin


class TioScheduler(Scheduler):
    """Stock, with the contract of ``additional_config["tio_contract"]`` in force in its process."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        given = (vllm_config.additional_config or {}).get(front.ARGUMENT)
        if given is not None:
            plugin.activate(read(given).contract)
        super().__init__(vllm_config, *args, **kwargs)
