"""What is patched in the process that starts an engine, so that a bad start is one readable line there and not a worker's traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.contract.environment import read
from tio_megatron.findings.finding import verdict
from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch, PatchSet
from tio_megatron.integrations.vllm import in_force, refusals

ARGUMENT = "tio_contract"
"""Key of ``additional_config`` that holds the contract."""


def refuse_early(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``EngineArgs.create_engine_config``: every way to start an engine passes here, before any other process starts."""

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (self.additional_config or {}).get(ARGUMENT)
        contract = read(given).contract if given is not None else in_force.active() if in_force.is_active() else None
        config = stock(self, *args, **kwargs)
        if contract is not None:
            verdict("tio_megatron does not cover", [*refusals.problems(config, contract), *refusals.other_dtype(self.dtype, config)])
        return config

    return create_engine_config


def _table() -> list[Patch]:
    from tio_megatron.integrations.vllm import refusing  # it imports vLLM

    supported = releases.described("vllm")
    return [
        Patch(
            "vllm.engine.arg_utils:EngineArgs.create_engine_config",
            refuse_early,
            "refusals where the user starts the engine, not deep in a worker",
            supported=supported,
        ),
        Patch(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            refusing.raise_refusals,
            "the reason of a refused request, as an exception",
            supported=supported,
        ),
    ]


patches = PatchSet(_table)
"""Those of the process that starts an engine. Engines without a contract are as before."""
