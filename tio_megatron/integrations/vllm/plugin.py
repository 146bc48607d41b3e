"""Entry point of stock vLLM's general plug-ins, called in every process of an engine.

Off unless ``TIO_CONTRACT`` is set (:mod:`tio_megatron.contract.environment`) or the engine is started with our worker class
(:mod:`.options`); then nothing of vLLM is imported, registered or patched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE, from_environment

if TYPE_CHECKING:
    from tio_megatron.integrations.patching import Installed

MODELS = {
    "Qwen3MoeForCausalLM": "tio_megatron.integrations.vllm.scoped:TioQwen3MoeForCausalLM",
    "Qwen3ForCausalLM": "tio_megatron.integrations.vllm.scoped:TioQwen3ForCausalLM",
}
"""Architectures covered, and the class that is built for each: stock model code with our layers inside."""

TRANSFER_BACKEND = "tio"
"""Name of our weight transfer engine, for ``weight_transfer_config={"backend": "tio"}``."""

_contract: Contract | None = None
_installed: Installed | None = None
_undo: list[Callable[[], None]] = []


def register() -> None:
    """What vLLM calls. Switches on if ``TIO_CONTRACT`` says so.

    Raises:
        ValueError: the variable names no contract.
        ImportError: vLLM or torch has another version than the supported one.
    """
    setting = from_environment()
    if setting is not None:
        activate(setting.contract)


def active() -> Contract:
    """The contract in force in this process.

    Raises:
        RuntimeError: the plug-in is off.
    """
    if _contract is None:
        raise RuntimeError(f"tio_megatron is off in this process: set {VARIABLE}, or start the engine with tio_megatron.integrations.vllm.engine_options(...)")
    return _contract


def is_active() -> bool:
    """Whether a contract is in force in this process."""
    return _contract is not None


def activate(contract: Contract) -> None:
    """Put ``contract`` in force for engines built in this process from now on. Activating the same contract again is harmless.

    Registers our two model classes and the weight transfer engine, and patches what has no seam (:mod:`.patches`).

    Raises:
        ValueError: another contract is in force.
        ImportError: vLLM or torch has another version than the supported one, or a symbol has moved.
    """
    global _contract
    if _contract is not None:
        if _contract != contract:
            raise ValueError(f"another contract is in force (in force / asked for: {'; '.join(_contract.differences(contract))})")
        return
    from tio_megatron.integrations import devices  # torch comes with it, which a process without the plug-in need not have yet
    from tio_megatron.integrations.vllm import front, platforms, refusals

    refusals.check_versions()
    devices.load(contract.family)
    if not platforms.is_ascend():
        # vLLM wants this module before all others of its workers: it replaces what torch lacks on a CPU.
        import vllm.v1.worker.cpu.shm  # noqa: F401

    from tio_megatron.integrations.patching import install
    from tio_megatron.integrations.vllm.patches import all_patches

    front.install()
    _undo.append(front.uninstall)
    installed = install(all_patches())
    _undo.append(_forget(installed))
    _undo.append(_register_models())
    _undo.append(_register_transfer())
    _undo.append(_prefer_first_model_runner())
    _contract = contract


def _forget(installed: Installed) -> Callable[[], None]:
    global _installed
    _installed = installed

    def undo() -> None:
        global _installed
        installed.undo()
        _installed = None

    return undo


def installed() -> Installed:
    """The patches in force in this process.

    Raises:
        RuntimeError: the plug-in is off.
    """
    active()
    assert _installed is not None
    return _installed


def deactivate() -> None:
    """Take everything back: engines built from now on in this process are stock. Harmless when off."""
    global _contract
    while _undo:
        _undo.pop()()
    _contract = None


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
    return {} if _contract is None else {"contract": _contract.to_dict(), "models": sorted(MODELS)}
