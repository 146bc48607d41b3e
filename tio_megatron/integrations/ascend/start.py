"""An NPU made ready for its family's kernels: switches first, then torch_npu, then the package whose attention runs."""

from __future__ import annotations

import importlib
import importlib.util

from tio_megatron.integrations.ascend import switches
from tio_megatron.kernels import npu_family

PACKAGES = {"vendor": None, "flash-attention-npu": "flash_attn_npu_v3"}
"""What brings the operators of each route of attention, beside torch_npu."""


def start() -> None:
    """Before the first process group and the first model of this process.

    Raises:
        SwitchError: a switch is against a fixed order or comes too late.
        ImportError: torch_npu, CANN's libraries or the attention's package are not there; says which.
    """
    switches.prepare()
    _bring("torch_npu", "torch_npu (pip install torch_npu==2.13.0, and CANN: source set_env.sh)")
    package = PACKAGES[npu_family.route()]
    if package is not None:
        _bring(package, f"flash-attention-npu ({package}), which {npu_family.VARIABLE} asks for")
    switches.set_level()
    switches.verify()


def _bring(module: str, words: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"an NPU's kernels need {words}; it is not installed")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"an NPU's kernels need {words}; it is installed and cannot be imported: {error}") from error
