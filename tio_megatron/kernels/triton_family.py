"""What all Triton kernels share that is not arithmetic: their version and how they are compiled. Needs no Triton itself."""

from __future__ import annotations

import importlib.metadata

VERSION = 1
"""Raised whenever the bytes of a Triton kernel change."""

TWO_ROUNDINGS = {"enable_fp_fusion": False}
"""Compile option of every kernel: a product and a sum stay two roundings (LLVM contracts nothing, ptxas has ``--fmad=false``). Where the
contract has one rounding, the kernel says ``tl.fma``."""


def small(device: str) -> bool:
    """Whether tiles must be small on this type of device: an NPU's compiler keeps no stack of tiles and little beside a row. Changes no byte."""
    return device == "npu"


def version() -> str:
    """The version of this package's kernels, and of the compiler: another one may choose another instruction."""
    return f"triton-{VERSION}+{importlib.metadata.version('triton')}"
