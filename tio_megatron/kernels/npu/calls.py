"""Where torch_npu's operators are found: among torch's own, under the names that ``import torch_npu`` registers. Nothing is imported here."""

from __future__ import annotations

import functools
from typing import Any

import torch

FLASH = "flash_attn_npu_arch22_v3"
"""Namespace of flash-attention-npu's operators for the 910B."""


@functools.cache
def find(name: str, namespace: str = "npu") -> Any:
    """The operator ``namespace::name``.

    Raises:
        RuntimeError: it is not registered in this process; says what registers it.
    """
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        package = "torch_npu" if namespace == "npu" else "flash_attn_npu_v3"
        raise RuntimeError(f"operator {namespace}::{name} is not registered: import {package} first (tio_megatron.kernels.npu.stand_in has CPU twins of it)")
    return packet.default
