"""What a layer needs to know while its model is built: the contract and the model's ledger. Set by :mod:`.scoped`, read in constructors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from tio_megatron.contract import Contract
from tio_megatron.integrations.vllm.weights import Ledger


@dataclass
class Build:
    """One model under construction."""

    contract: Contract
    ledger: Ledger = field(default_factory=Ledger)


_current: Build | None = None


def current() -> Build:
    """The model under construction.

    Raises:
        RuntimeError: one of our layers is built outside a model of ours.
    """
    if _current is None:
        raise RuntimeError("a layer of tio_megatron is built outside its model; build one of the classes of integrations.vllm.scoped")
    return _current


@contextlib.contextmanager
def building(build: Build) -> Iterator[Build]:
    """Make ``build`` the current one."""
    global _current
    before, _current = _current, build
    try:
        yield build
    finally:
        _current = before
