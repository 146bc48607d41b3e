"""The release of DeepSpeed that the patches are written for. Names only; imports none of it."""

from __future__ import annotations

import importlib.metadata

from tio_megatron.integrations.megatron.versions import TORCH, installed

DEEPSPEED = "0.19.8"
"""Another release may compute another function under the same names, so it is refused, not tried."""


def check() -> None:
    """Refuse a version of torch or DeepSpeed that was not tested.

    Raises:
        ImportError: names what is installed and what is supported.
    """
    installed("torch", (TORCH,))
    installed("deepspeed", (DEEPSPEED,))


def present() -> bool:
    """Whether DeepSpeed is installed, of whatever version."""
    try:
        importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
