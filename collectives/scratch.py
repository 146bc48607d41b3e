"""Buffers kept between calls, so that a steady state allocates nothing but results.

A fresh large buffer on the CPU costs a page fault every 4 KiB. Accelerators have an allocator that keeps memory and knows streams;
there a buffer lives for one call.
"""

from __future__ import annotations

import threading

import torch

KEEP_BYTES = 64 << 20
"""Most bytes kept per thread; a larger buffer lives for one call."""

_local = threading.local()


def borrow(elements: int, device: torch.device) -> torch.Tensor:
    """``elements`` fp32 numbers, uninitialised, valid until this thread borrows again."""
    if device.type != "cpu" or elements * 4 > KEEP_BYTES:
        return torch.empty(elements, dtype=torch.float32, device=device)
    kept: torch.Tensor | None = getattr(_local, "kept", None)
    if kept is None or kept.numel() < elements:
        _local.kept = None  # first, so that old and new never exist together
        kept = _local.kept = torch.empty(elements, dtype=torch.float32)
    return kept[:elements]


def release() -> None:
    """Give this thread's kept buffer back."""
    _local.kept = None
