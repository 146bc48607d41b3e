"""Makes Megatron-LM's training scripts run on CPU and gloo. Changes where things happen, never the order of a sum.

On top of :mod:`tio_megatron.integrations.megatron.cpu_device`, which does the same for megatron-core; independent of the contract, so a
stock control on a CPU uses this alone. Three things in ``megatron.training`` stand in the way:

* it asks CUDA whether it is there, how many devices and of which kind, before it starts anything;
* it writes ``device="cuda"``;
* it compiles: fused kernels for a GPU at start, and the C++ helper of its datasets by ``make`` (skipped where that one is there already).
"""

from __future__ import annotations

import importlib.util
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from tio_megatron.integrations import releases
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.integrations.patching import Patch, PatchSet

logger = logging.getLogger(__name__)

TRAINING = "megatron.training"

_ASKS_CUDA = ("arguments", "checkpointing", "initialize", "training", "utils", "yaml_arguments")
"""Modules of ``megatron.training`` that name CUDA."""


def enable() -> None:
    """Let Megatron-LM run on this CPU, megatron-core with it. Harmless when called again.

    Raises:
        RuntimeError: a CUDA device is present, or a contract is applied already.
        MovedSymbolError: another version of megatron-core or Megatron-LM is installed.
    """
    if not _switch.is_on:
        cpu_device.enable()
    _switch.on()


def disable() -> None:
    """Restore every symbol. Harmless when not enabled."""
    _switch.undo()
    cpu_device.disable()


class _Cuda(types.ModuleType):
    """``torch.cuda`` as the training script sees it: one device, of which nothing is ever used."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        """The script refuses to start otherwise."""
        return True

    def device_count(self) -> int:
        """Groups are only made, and generators seeded, where there is a device."""
        return 1

    def set_device(self, device: Any) -> None:
        """There is nothing to choose."""

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Asked before grouped experts are allowed; ours need no such thing."""
        return (10, 0)

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """From 10 on the order of launches needs no environment variable."""
        return types.SimpleNamespace(major=10, minor=0, name="CPU")


def _patches() -> list[Patch]:
    host = cpu_device.host_torch()
    host.cuda = _Cuda()  # type: ignore[attr-defined]
    patches = [_patch(f"{module}:torch", lambda original: host, "names CUDA") for module in _ASKS_CUDA]
    return [
        *patches,
        _patch("initialize:_warmup_jit_function", lambda original: lambda: None, "compiles fused kernels for a GPU; they are compiled when used"),
        _patch("initialize:fused_kernels", lambda original: types.SimpleNamespace(load=lambda args: None), "asks the CUDA compiler for its version"),
        Patch(
            "megatron.core.datasets.utils:compile_helpers",
            _compile_unless_there,
            why="needs make, pybind11 and Python's headers",
            supported=releases.described("Megatron-LM"),
        ),
    ]


def _patch(target: str, build: Callable[[Any], Any], why: str) -> Patch:
    return Patch(f"{TRAINING}.{target}", build, why=why, supported=releases.described("Megatron-LM"))


def _compile_unless_there(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()
        else:
            logger.info("the datasets' C++ helper is compiled already")

    return compile_helpers


_switch = PatchSet(_patches, on_import=True)
