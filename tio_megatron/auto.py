"""``import tio_megatron.auto`` applies the contract that the environment names: for configurations that can only name a module to import.

``TIO_CONTRACT`` is ``1`` or ``default`` (the default contract), a JSON object, or the path of a JSON file; unset, empty or ``0``: nothing
is applied. The JSON holds the contract's fields and may hold ``vocab_size``.
"""

from __future__ import annotations

import os

import tio_megatron

VARIABLE = "TIO_CONTRACT"


def apply_from_environment() -> bool:
    """Apply what ``TIO_CONTRACT`` names; returns whether anything was applied.

    Raises:
        ValueError: the variable is neither JSON nor a file, or another contract is in force.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if value in ("", "0"):
        return False
    try:
        tio_megatron.apply(None if value in ("1", "default") else value)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={value!r}: {error}") from error
    return True


apply_from_environment()
