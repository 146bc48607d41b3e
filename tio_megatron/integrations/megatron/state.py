"""What is in force right now: the contract applied to megatron-core in this process."""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.contract import Contract


@dataclass(frozen=True)
class Session:
    """One application of a contract.

    ``vocab_size`` is the true vocabulary (rows past it are padding and never count); ``None`` means that every row of a model's
    vocabulary counts.
    """

    contract: Contract
    vocab_size: int | None = None


_session: Session | None = None


def session() -> Session | None:
    """The session in force, or ``None`` outside :func:`tio_megatron.apply`."""
    return _session


def active() -> Contract:
    """The contract in force.

    Raises:
        RuntimeError: no contract is applied. A model built under ``apply()`` also has to run under it: half of the sums would be stock's.
    """
    if _session is None:
        raise RuntimeError("no contract is applied: call tio_megatron.apply(...) before building or running the model, and undo() only after the last use")
    return _session.contract


def enter(new: Session) -> None:
    """Put ``new`` in force. Only :mod:`.apply` calls this."""
    global _session
    _session = new


def leave() -> None:
    """Put nothing in force. Only :mod:`.apply` calls this."""
    global _session
    _session = None
