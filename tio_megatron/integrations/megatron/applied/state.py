"""What is in force right now in this process: the contract, and the patches by which megatron-core and DeepSpeed obey it."""

from __future__ import annotations

from typing import Any, Protocol

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import Setting


class Patches(Protocol):
    """Patches in force: a :class:`tio_megatron.integrations.patching.PatchSet`, or those that went through MindSpeed's manager."""

    through: str

    @property
    def targets(self) -> tuple[str, ...]: ...

    def problems(self) -> list[str]: ...

    def shared(self) -> dict[str, str]: ...

    def undo(self) -> None: ...


_patches: list[Patches] = []
_session: Setting | None = None
_learned = False


def session() -> Setting | None:
    """The setting in force (contract and true vocabulary), or ``None`` outside :func:`tio_megatron.apply`.

    ``vocab_size`` is the true vocabulary: rows past it are padding and never count; ``None`` means that every row counts.
    """
    return _session


def active() -> Contract:
    """The contract in force.

    Raises:
        RuntimeError: no contract is applied. A model built under ``apply()`` also has to run under it: half of the sums would be stock's.
    """
    if _session is None:
        raise RuntimeError("no contract is applied: call tio_megatron.apply(...) before building or running the model, and undo() only after the last use")
    return _session.contract


def learn_vocab_size(size: int) -> None:
    """The true vocabulary, from whoever knows it (a tokenizer) after ``apply()`` was told none. Before models are built.

    Raises:
        ValueError: another one is in force.
    """
    global _session, _learned
    setting = Setting(active(), size)
    if _session is not None and _session.vocab_size not in (None, size):
        raise ValueError(f"the true vocabulary is {_session.vocab_size} already, not {size}")
    _session, _learned = setting, True


def learned() -> bool:
    """Whether the true vocabulary in force was learned, not given to ``apply()``."""
    return _learned


def enter(new: Setting) -> None:
    """Put ``new`` in force. Only :mod:`.apply` calls this."""
    global _session, _learned
    _session, _learned = new, False


def leave() -> None:
    """Put nothing in force. Only :mod:`.apply` calls this."""
    global _session, _learned
    _session, _learned = None, False


def put(*patches: Patches) -> None:
    """Remember the ``patches`` that are in force. Only :mod:`.apply` calls this."""
    _patches.extend(patches)


def remove_patches() -> None:
    """Restore every symbol, what was put first being restored last. Only :mod:`.apply` calls this.

    Raises:
        RuntimeError: somebody replaced one of our symbols after us.
    """
    while _patches:
        _patches[-1].undo()
        _patches.pop()


def problems() -> list[str]:
    """Why the contract is not in force in this process: one line for each patch of ours that is not there, by its symbol. Empty when all is well.

    A worker asks this after everything that patches has run (MindSpeed's ``repatch``, for instance).
    """
    if not _patches:
        return ["nothing is applied in this process: call tio_megatron.apply(), or import tio_megatron.auto with TIO_CONTRACT set"]
    return [line for patches in _patches for line in patches.problems()]


def patched() -> dict[str, Any]:
    """How the contract is in force in this process, for reports: ``through`` whom, the ``symbols``, and those ``shared`` with another plug-in."""
    symbols = sorted(target for patches in _patches for target in patches.targets)
    shared = {symbol: other for patches in _patches for symbol, other in patches.shared().items()}
    return {"through": _patches[0].through if _patches else None, "symbols": symbols, "shared": shared}
