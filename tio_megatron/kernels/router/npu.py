"""Routing on an NPU by our Triton kernels, through triton-ascend: torch_npu's top-k does not say how it breaks ties. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("router")
