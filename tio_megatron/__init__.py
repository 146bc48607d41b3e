"""tio_megatron ("train-inference one"): one order for every sum, so that trainer and rollout agree to the last byte.

>>> import tio_megatron as tio
>>> contract = tio.Contract.for_layouts(tio.Layout(tp=2, ep=2, etp=1), tio.Layout.for_vllm(tp=4))
>>> contract.cuts.mlp_row
4

``with tio.apply(contract):`` puts it in force in stock megatron-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tio_megatron.contract import Contract, Layout, ModelShape

if TYPE_CHECKING:
    from tio_megatron.integrations.megatron.applied.apply import Applied

__version__ = "0.1.0"
__all__ = ["Contract", "Layout", "ModelShape", "apply", "undo"]


def apply(contract: Contract | Mapping[str, Any] | str | Path | None = None, *, vocab_size: int | None = None) -> Applied:
    """Make megatron-core in this process obey ``contract``; see :func:`tio_megatron.integrations.megatron.applied.apply.apply`.

    Raises:
        ValueError: another contract is in force, or this one is not valid.
        ImportError: torch or megatron-core has another version than the supported one.
    """
    from tio_megatron.integrations.megatron.applied.apply import apply as apply_to_megatron

    return apply_to_megatron(contract, vocab_size=vocab_size)


def undo() -> None:
    """Restore every symbol of megatron-core. Harmless when nothing is applied."""
    from tio_megatron.integrations.megatron.applied.apply import undo as undo_in_megatron

    undo_in_megatron()
