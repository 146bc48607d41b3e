"""Empty modules under the names that MindSpeed imports and this machine lacks, so that its Python can be imported on a CPU.

This is no emulation of an NPU: every attribute is an object that does nothing, and nothing that it would compute is used by a test. Stubbed:
``torch_npu`` (and ``torch.npu``), ``torchair``, ``acl``, ``scipy``, ``fla_npu``, and MindSpeed's own ``core.ssm``, whose Triton kernels are written for
triton-ascend.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ROOTS = ("torch_npu", "torchair", "acl", "scipy", "fla_npu")
INSIDE = ("mindspeed.core.ssm",)


class _Nothing:
    """Any value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ROOTS or any(name == inside or name.startswith(f"{inside}.") for inside in INSIDE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        # MindSpeed looks for header files beside it, without opening them.
        module.__path__, module.__file__ = [], f"/nowhere/{module.__name__}/__init__.py"


def install() -> None:
    """Make the names importable in this process, for good."""
    import torch

    sys.meta_path.insert(0, _Finder())
    torch.npu = importlib.import_module("torch_npu.npu")
