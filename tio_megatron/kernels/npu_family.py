"""The version of the family ``npu-910b``, and the one choice it leaves: which package's attention runs. Holds no arithmetic."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from tio_megatron.kernels.npu import lowered

VARIABLE = "TIO_NPU_ATTENTION"
ROUTES = ("vendor", "flash-attention-npu")
"""``vendor``: torch_npu's operators. ``flash-attention-npu``: the package of that name, one kernel for training, prefill and decode."""
NUMBER = 1
"""Raised whenever what the family asks of a device changes."""


@functools.cache
def route() -> str:
    """Whose attention runs in this process: ``TIO_NPU_ATTENTION``, or ``vendor``. Read once.

    Raises:
        ValueError: another name.
    """
    return asked(os.environ)


def asked(environ: Mapping[str, str]) -> str:
    """The route that ``environ`` asks for.

    Raises:
        ValueError: another name.
    """
    name = environ.get("TIO_NPU_ATTENTION", "") or ROUTES[0]
    if name not in ROUTES:
        raise ValueError(f"{VARIABLE}={name!r}: the attention of an NPU is one of {', '.join(ROUTES)}")
    return name


def version() -> str:
    """For the fingerprint: two sides whose attention comes from two packages, or whose Triton kernels from two compilers, refuse each other."""
    return f"npu-910b.{NUMBER} attention={route()} {lowered.version()}"
