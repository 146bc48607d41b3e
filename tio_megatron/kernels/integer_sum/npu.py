"""Exact sums over tokens on an NPU by our Triton kernels, through triton-ascend: integers alone, no float64. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("integer_sum")
