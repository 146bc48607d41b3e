"""Sums of squares and scaling on an NPU by our Triton kernel, through triton-ascend. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("squares")
