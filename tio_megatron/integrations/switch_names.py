"""Environment variables that may move an order of sums, by the beginnings of their names: what a worker says it was started with. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIXES = ("NCCL_", "HCCL_", "LCCL_", "ATB_", "CUBLAS_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "NVTE_", "VLLM_", "OMP_")
"""Other people's."""
ALSO = (
    "ACL_OPT_DETERMINISTIC",
    "CLOSE_MATMUL_K_SHIFT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Single names that no beginning covers."""
OURS = ("TIO_COLLECTIVE_SCHEDULE", "TIO_COLLECTIVE_SWITCH_BYTES", "TIO_COLLECTIVE_SECONDS", "TIO_COLLECTIVE_CHECK", "TIO_NPU_ATTENTION")
"""This package's that must be the same on all ranks."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "CRED")
"""Parts of names whose values are nobody's business (``VLLM_API_KEY``)."""
LONGEST = 200


def read(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set, long values cut; none whose name sounds like a secret.

    >>> read({"NCCL_ALGO": "Ring", "VLLM_API_KEY": "no", "HOME": "no"})
    {'NCCL_ALGO': 'Ring'}
    """
    values = os.environ if environ is None else environ
    return {
        name: values[name][:LONGEST]
        for name in sorted(values)
        if (name.startswith(PREFIXES) or name in ALSO or name in OURS) and not any(part in name.upper() for part in SECRET)
    }
