"""A device that torch knows, made in Python, and a kernel family on it: what adding an accelerator takes, without one.

A toy tensor holds a CPU tensor. Plain torch operators run on what it holds; operators of ``tio::`` go through torch's dispatcher to
the family's kernels, as on any device. :func:`install` renames torch's spare device for the whole process and starts a thread for it with the
first backward pass (after which a process may not fork): use it in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections import Counter
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from tio_megatron import kernels
from tio_megatron.contract import FAMILIES, Family
from tio_megatron.kernels import families

calls: Counter[str] = Counter()
"""How often each kernel of the family has run."""

_kept: list[torch.library.Library] = []
"""Registrations live as long as the object that made them."""


def install() -> None:
    """Make the device and the family."""
    backend_registration._setup_privateuseone_for_python_backend("toy")
    FAMILIES["toy"] = Family(device="toy", file="toy", fields=FAMILIES["cpu"].fields, operands=("bfloat16",))
    made = torch.library.Library("aten", "IMPL")
    made.impl("empty.memory_format", _empty, "PrivateUse1")
    made.impl("empty_strided", _empty_strided, "PrivateUse1")
    made.impl("_copy_from", _copy_from, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        made.impl(overload, _arange, "PrivateUse1")
    _kept.append(made)


class Toy(torch.Tensor):
    """A tensor on the device ``toy``; ``held`` is the CPU tensor behind it."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> Toy:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="toy:0", requires_grad=requires_grad
        )
        made.held = held.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "tio":
            below = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
            with torch._C._ExcludeDispatchKeyGuard(below):
                return func(*args, **kwargs)
        if str(kwargs.get("device", "")).startswith("toy"):
            kwargs["device"] = torch.device("cpu")
        with torch._C._DisableTorchDispatch():
            result = func(*take(args), **take(kwargs))
        written = func._schema.is_mutable and args and isinstance(args[0], Toy)
        return args[0] if written else give(result)

    def tolist(self) -> Any:
        """torch has none for tensors that are made in Python."""
        return self.held.tolist()


def take(tree: Any) -> Any:
    """What toy tensors hold."""
    return tree_map_only(Toy, lambda tensor: tensor.held, tree)


def give(tree: Any) -> Any:
    """CPU tensors as toy tensors."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor if isinstance(tensor, Toy) else Toy(tensor), tree)


def kernel(operator: str) -> Any:
    """The family's kernel of ``tio::operator``: the CPU's, on what the tensors hold."""
    on_cpu = getattr(torch.ops.tio, operator).default

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[operator] += 1
        return give(on_cpu(*take(args), **take(kwargs)))

    return run


def implement(*operators: str) -> None:
    """Give the family kernels of these operators."""
    for operator in operators:
        families.implement(operator, "toy", kernel(operator), family="toy")


def _empty(shape: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None) -> Toy:
    """What autograd makes without a tensor at hand: zeros for a gradient that nobody gave."""
    return Toy(torch.empty(shape, dtype=dtype, device="cpu"))


def _empty_strided(shape: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Toy:
    """What ``.to("toy")`` copies into."""
    return Toy(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What ``torch.tensor(..., device="toy")`` fills it with."""
    take(target).copy_(take(source))
    return target


def _arange(*bounds: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Toy:
    """Made whole: torch's own would resize an empty tensor."""
    return Toy(torch.arange(*bounds, dtype=dtype, device="cpu"))


def take_family(file: str) -> None:
    """Give the device the kernels of a family: ``KERNELS`` of every ``kernels/<op>/<file>.py``, on what its tensors hold."""
    for folder in pkgutil.iter_modules(kernels.__path__):
        if folder.ispkg and importlib.util.find_spec(f"tio_megatron.kernels.{folder.name}.{file}"):
            for operator, function in importlib.import_module(f"tio_megatron.kernels.{folder.name}.{file}").KERNELS.items():
                families.implement(operator, "toy", _on_held(operator, function), family="toy")


def _on_held(operator: str, function: Any) -> Any:
    def run(*args: Any) -> Any:
        calls[operator] += 1
        return give(function(*take(args)))

    return run
