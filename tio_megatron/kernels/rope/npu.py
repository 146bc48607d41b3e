"""Rotary positions on an NPU by our Triton kernel, through triton-ascend: torch_npu's rounds the two products apart. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("rope")
