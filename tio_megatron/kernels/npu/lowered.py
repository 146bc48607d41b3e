"""Our Triton kernels as kernels of an NPU's family: the same sources, lowered by triton-ascend. *Built, not run.*"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

from tio_megatron.kernels import triton_family

PACKAGE = "triton-ascend"


def installed() -> bool:
    """Whether there is a Triton. On an NPU's machine it must be triton-ascend, which takes Triton's name."""
    return importlib.util.find_spec("triton") is not None


def kernels(op: str) -> dict[str, Callable[..., Any]]:
    """What ``kernels/<op>/triton.py`` offers; nothing without Triton, and then the operators are refused by name on the device."""
    if not installed():
        return {}
    offered: dict[str, Callable[..., Any]] = importlib.import_module(f"tio_megatron.kernels.{op}.triton").KERNELS
    return offered


def version() -> str:
    """Of the kernels and of the compiler."""
    try:
        compiler = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        compiler = "none"
    return f"triton-{triton_family.VERSION}+{PACKAGE}-{compiler}"
