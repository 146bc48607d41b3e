"""exp, log and the tree's sum on an NPU by our Triton kernels, through triton-ascend. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("math")
