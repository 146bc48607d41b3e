"""A device made in Python that takes no tensor of the host: what megatron-core under the contract does with the device it is given, without one.

Beyond :mod:`tests.support.toy_device`, an operator whose tensors lie partly there and partly on the host raises, as on a GPU or an NPU. Numbers without
an axis may lie anywhere, indices may lie on the host, and so may the lengths that attention reads there. megatron-core finds the device where it looks
for CUDA. For a process of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils as megatron_utils
from torch.utils._pytree import tree_leaves

import tests.support.toy_device as toy
from benchmarks import main_job
from tio_megatron import kernels
from tio_megatron.integrations import devices
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.kernels import families

DEVICE = "toy:0"
MOVES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")
BY_HOST_INDICES = ("aten::index", "aten::index_put_")
WITH_LENGTHS = ("tio::attention", "tio::attention_backward", "tio::attention_paged", "tio::add_products")
"""Operators that read where sequences, or grains, start; the kernels of every family take those from the host."""


def job(rank: int, file: str, work: main_job.Work, layout: str) -> tuple[list[main_job.Round], dict[str, str], dict[str, int]]:
    """:func:`benchmarks.main_job.job` on this device, or on the CPU if that is where the work lies; and how often each kernel of the device ran."""
    if work.device != "cpu":
        install(file)
    return *main_job.job(rank, work, layout), dict(toy.calls)


def install(file: str = "cpu") -> None:
    """Make the device, give it the kernels of a family (``cpu`` or ``triton``, interpreted then), and show it to megatron-core."""
    toy.install()
    if file == "cpu":
        for folder in pkgutil.iter_modules(kernels.__path__):
            if folder.ispkg and folder.name != "npu":
                importlib.import_module(f"tio_megatron.kernels.{folder.name}")
        toy.implement(*(name for name, there in families._table.items() if "cpu" in there))
    else:
        from tests.triton_kernels import interpreter

        interpreter.install()
        toy.take_family(file)
        devices.load = lambda name: None  # it would ask for the device of the contract's family
    toy.Toy.__torch_dispatch__ = classmethod(_strict)
    cpu_device.CPU = torch.device(DEVICE)
    cpu_device.enable()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(DEVICE)
    torch.Tensor.type = _type(torch.Tensor.type)
    torch.nn.Module.to = _module_to(torch.nn.Module.to)
    # It gives one tensor the memory of another (`a.data = b`), which torch cannot do for a tensor made in Python.
    megatron_utils._kernel_make_viewless_tensor = lambda tensor, requires_grad: tensor.detach().clone().requires_grad_(requires_grad)
    # torch's gloo takes CUDA tensors by itself, and knows none of this device.
    dist.all_reduce = _by_host(dist.all_reduce)


_plain = toy.Toy.__torch_dispatch__.__func__


def _strict(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name, kwargs = func._schema.name, dict(kwargs or {})
    tensors = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)]
    if name not in MOVES + BY_HOST_INDICES + WITH_LENGTHS and any(isinstance(t, toy.Toy) for t in tensors):
        strange = [f"{t.dtype} {list(t.shape)}" for t in tensors if t.dim() and not isinstance(t, toy.Toy)]
        if strange:
            raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, but {', '.join(strange)} lie on the host")
    if name == "aten::_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        with torch._C._DisableTorchDispatch():
            return func(*toy.take(args), **kwargs)
    return _plain(cls, func, types, args, kwargs)


def _type(original: Any) -> Any:
    """megatron-core sorts parameters by this string."""

    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.toy.", "torch.") if isinstance(answer, str) else answer

    return typed


def _module_to(original: Any) -> Any:
    """A parameter that moves to an accelerator stays the same object, with what is written on it; torch cannot do that for a tensor made in Python."""

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not args or str(args[0]) not in ("toy", str(DEVICE)):
            return original(self, *args, **kwargs)
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, toy.Toy):
                    moved = torch.nn.Parameter(toy.Toy(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                    moved.__dict__.update(parameter.__dict__)
                    module._parameters[name] = moved
        return self

    return to


def _by_host(original: Any) -> Any:
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(toy.take(tensor), *args, **kwargs)

    return all_reduce
