"""Products on an NPU by our Triton kernel, through triton-ascend: leaves, their tree, one fp32 accumulator a leaf. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("linear")
