"""What is in force right now: the contract applied to megatron-core in this process."""

from __future__ import annotations

from tio_megatron.contract import Contract
from tio_megatron.contract.environment import Setting

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
