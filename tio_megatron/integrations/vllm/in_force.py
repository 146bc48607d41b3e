"""What is in force in this process: the contract and the patches of vLLM. :mod:`.plugin` switches both on and off; every other module only asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import VARIABLE
from tio_megatron.models import architectures

if TYPE_CHECKING:
    from tio_megatron.integrations.patching import PatchSet

MODELS = {name: f"tio_megatron.integrations.vllm.scoped:Tio{name}" for name in architectures()}
"""Architectures covered, and the class that is built for each: stock model code with our layers inside."""

_contract: Contract | None = None
_patches: PatchSet | None = None


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


def patches() -> PatchSet:
    """The patches in force in this process.

    Raises:
        RuntimeError: the plug-in is off.
    """
    active()
    assert _patches is not None
    return _patches


def enter(contract: Contract, installed: PatchSet | None) -> None:
    """Put ``contract`` in force. Only :mod:`.plugin` calls this."""
    global _contract, _patches
    _contract, _patches = contract, installed


def leave() -> None:
    """Put nothing in force. Only :mod:`.plugin` calls this."""
    global _contract, _patches
    _contract, _patches = None, None
