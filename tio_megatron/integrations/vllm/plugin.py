"""Entry point of stock vLLM's general plug-ins, called in every process of an engine.

Off unless ``TIO_CONTRACT`` is set (:mod:`tio_megatron.contract.environment`) or the engine is started with our worker class
(:mod:`.options`); then nothing of vLLM is imported, registered or patched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment
from tio_megatron.findings.finding import unjudged
from tio_megatron.integrations.vllm import in_force
from tio_megatron.integrations.vllm.in_force import MODELS, active, is_active

TRANSFER_BACKEND = "tio"
"""Name of our weight transfer engine, for ``weight_transfer_config={"backend": "tio"}``."""

_undo: list[Callable[[], None]] = []


def register() -> None:
    """What vLLM calls. Switches on if ``TIO_CONTRACT`` says so.

    Raises:
        ValueError: the variable names no contract.
        ImportError: vLLM or torch has another version than the supported one.
    """
    setting = from_environment()
    if setting is None:
        unjudged(f"{VARIABLE} names no contract")
    else:
        activate(setting.contract)


def activate(contract: Contract) -> None:
    """Put ``contract`` in force for engines built in this process from now on. Activating the same contract again is harmless.

    Registers our model classes and the weight transfer engine, and patches what has no seam (:mod:`.patches`).

    Raises:
        ValueError: another contract is in force.
        ImportError: vLLM or torch has another version than the supported one, or a symbol has moved.
    """
    if is_active():
        if active() != contract:
            raise ValueError(f"another contract is in force (in force / asked for: {'; '.join(active().differences(contract))})")
        return
    from tio_megatron.integrations import devices  # torch comes with it, which a process without the plug-in need not have yet
    from tio_megatron.integrations.vllm import front, platforms, refusals

    refusals.check_versions()
    devices.load(contract.family)
    if not platforms.is_ascend():
        # vLLM wants this module before all others of its workers: it replaces what torch lacks on a CPU.
        import vllm.v1.worker.cpu.shm  # noqa: F401

    from tio_megatron.integrations.patching import PatchSet
    from tio_megatron.integrations.vllm.patches import all_patches

    front.patches.on()
    _undo.append(front.patches.undo)
    installed = PatchSet(all_patches).on()
    _undo.append(installed.undo)
    _undo.append(_register_models())
    _undo.append(_register_transfer())
    _undo.append(_prefer_first_model_runner())
    in_force.enter(contract, installed)


def deactivate() -> None:
    """Take everything back: engines built from now on in this process are stock. Harmless when off."""
    while _undo:
        _undo.pop()()
    in_force.leave()


def _register_models() -> Callable[[], None]:
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models.registry import ModelRegistry

    before = {name: ModelRegistry.models.get(name) for name in MODELS}
    for name, path in MODELS.items():
        ModelRegistry.register_model(name, path)
    # A process that has built a stock engine remembers which class an architecture means.
    utils._MODEL_ARCH_BY_HASH.clear()

    def undo() -> None:
        for name, model in before.items():
            if model is None:
                del ModelRegistry.models[name]
            else:
                ModelRegistry.models[name] = model
        utils._MODEL_ARCH_BY_HASH.clear()

    return undo


def _register_transfer() -> Callable[[], None]:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, "tio_megatron.integrations.vllm.transfer", "TioTransferEngine")

    def undo() -> None:
        del WeightTransferEngineFactory._registry[TRANSFER_BACKEND]

    return undo


def _prefer_first_model_runner() -> Callable[[], None]:
    """With Triton present vLLM takes its second model runner, whose log-probabilities pass by the sampler's ``compute_logprobs``."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    if name in os.environ:
        return lambda: None
    os.environ[name] = "0"

    def undo() -> None:
        os.environ.pop(name, None)

    return undo


def state() -> dict[str, Any]:
    """What is in force, for reports: empty when off."""
    return {"contract": active().to_dict(), "models": sorted(MODELS)} if is_active() else {}
