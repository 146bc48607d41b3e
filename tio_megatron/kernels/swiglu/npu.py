"""SiLU and SwiGLU on an NPU by our Triton kernels, through triton-ascend: torch_npu's does not say where it rounds. *Built, not run.*"""

from __future__ import annotations

from tio_megatron.kernels.npu.lowered import kernels

KERNELS = kernels("swiglu")
