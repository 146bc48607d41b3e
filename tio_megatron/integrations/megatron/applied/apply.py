"""``tio_megatron.apply`` and ``tio_megatron.undo``: puts a contract in force in stock megatron-core, and in DeepSpeed when somebody imports it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import Setting, read
from tio_megatron.integrations import devices, mindspeed, releases, strangers
from tio_megatron.integrations.deepspeed.patches import deepspeed_patches
from tio_megatron.integrations.import_hook import ImportHook
from tio_megatron.integrations.megatron import versions
from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron_lm.patches import training_patches
from tio_megatron.integrations.mindspeed.install import install as install_through_mindspeed
from tio_megatron.integrations.mindspeed.manager import ADAPTOR
from tio_megatron.integrations.patching import PatchSet
from tio_megatron.layers import grads
from tio_megatron.layers.gradient_sums import ToSums

logger = logging.getLogger(__name__)

_mindspeed: ImportHook | None = None
"""Waits for MindSpeed, which must find stock symbols when it patches; ours lie on top of its own."""


class Applied:
    """What :func:`apply` returns: a handle, also usable as a context manager.

    As a context manager it undoes at the end of the block, unless an enclosing ``apply`` with the same contract was there before.
    """

    def __init__(self, session: Setting, owner: bool) -> None:
        self.session = session
        self._owner = owner

    @property
    def contract(self) -> Contract:
        """The contract in force."""
        return self.session.contract

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._owner:
            undo()


def apply(contract: Contract | Mapping[str, Any] | str | Path | None = None, *, vocab_size: int | None = None) -> Applied:
    """Make megatron-core in this process obey ``contract``, and DeepSpeed as soon as it is imported. Build models after this call.

    Either package may be missing.

    Args:
        contract: anything that :func:`tio_megatron.contract.environment.read` reads; ``None`` for the default contract.
        vocab_size: true vocabulary. Rows past it (a model's vocabulary is padded to divide by TP) never count and may hold NaN. When
            it is not given, all rows of a model's vocabulary count.

    Returns:
        A handle; ``with apply(...):`` undoes at the end of the block. Applying the same again is harmless.

    Raises:
        ValueError: another contract is in force already, the contract is not valid, or its kernel family cannot be had here.
        ImportError: torch, megatron-core or DeepSpeed has a version that is not supported (those that are, are named), or a symbol has moved; or neither
            of the two is installed.
    """
    session = _setting(contract, vocab_size)
    current = state.session()
    if current is not None:
        if current == session or (state.learned() and session == Setting(current.contract)):
            return Applied(session, owner=False)
        found = current.contract.differences(session.contract)
        if current.vocab_size != session.vocab_size:
            found.append(f"vocab_size: {current.vocab_size} / {session.vocab_size}")
        raise ValueError(f"another contract is applied (in force / asked for: {'; '.join(found)}); call tio_megatron.undo() first")
    warning = strangers.apex_warning()
    if warning is not None:
        logger.warning(warning)
    versions.check(needed=releases.installed("deepspeed") is None)
    devices.load(session.contract.family)
    _install()
    _wait_for_mindspeed()
    if versions.present():
        grads.use(ToSums())
    state.enter(session)
    if not mindspeed.present():  # its manager lets both have the symbol
        _tell_of_others()
    return Applied(session, owner=True)


def undo() -> None:
    """Restore every symbol of megatron-core and DeepSpeed. Harmless when nothing is applied.

    Raises:
        RuntimeError: somebody replaced one of our symbols after us.
    """
    state.remove_patches()
    if _mindspeed is not None:
        _mindspeed.remove()
    grads.use(grads.ToAutograd())
    if versions.present():
        from tio_megatron.integrations.megatron.training import micro_batches

        micro_batches.leave()
    state.leave()


def _wait_for_mindspeed() -> None:
    """verl imports ``tio_megatron.auto`` when it is itself imported, and MindSpeed's adaptor only in its workers."""
    global _mindspeed
    if not mindspeed.present() and importlib.util.find_spec("mindspeed") is not None:
        _mindspeed = ImportHook(ADAPTOR, before=state.remove_patches, after=_install, failed=_install)


def _tell_of_others() -> None:
    """A warning for each symbol that two plug-ins patch: ours lies on top, and what the other does there may be gone."""
    for symbol, other in state.patched()["shared"].items():
        logger.warning(
            "%s is %s's, and tio_megatron patches it too: ours is in force, and what %s does there may not happen. Take that patch out, or import "
            "tio_megatron.auto before it to have it refused",
            symbol,
            other,
            other,
        )


def _install() -> None:
    waiting = PatchSet([*training_patches(), *deepspeed_patches()], on_import=True).on()
    try:
        into_megatron = _into_megatron() if versions.present() else PatchSet(()).on()
    except BaseException:
        waiting.undo()
        raise
    state.put(into_megatron, waiting)


def _into_megatron() -> state.Patches:
    # The classes that models are built of, too: they are subclasses of stock's, which MindSpeed may replace later.
    from tio_megatron.integrations.megatron.applied import build  # noqa: F401
    from tio_megatron.integrations.megatron.applied.patches import all_patches

    return install_through_mindspeed(all_patches()) if mindspeed.present() else PatchSet(all_patches).on()


def _setting(contract: Contract | Mapping[str, Any] | str | Path | None, vocab_size: int | None) -> Setting:
    setting = read(contract)
    if vocab_size is None or vocab_size == setting.vocab_size:
        return setting
    if setting.vocab_size is not None:
        raise ValueError(f"vocab_size is given twice: {setting.vocab_size} in the contract, {vocab_size} as argument")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"vocab_size must be a positive whole number, got {vocab_size!r}")
    return Setting(setting.contract, vocab_size)
