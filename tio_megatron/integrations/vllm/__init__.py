"""Stock vLLM under the contract: a plug-in, layers swapped in by scope, weights moved in. Adapts shapes, weights and groups; no arithmetic lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tio_megatron.integrations.vllm.options import engine_options
    from tio_megatron.integrations.vllm.trainer_side import push_weights, rollout_contract

__all__ = ["engine_options", "push_weights", "rollout_contract"]

_HOME = {"engine_options": "options", "push_weights": "trainer_side", "rollout_contract": "trainer_side"}


def __getattr__(name: str) -> Any:
    # Lazily: vLLM imports this package in every process to find the entry point, also where the plug-in is off.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
