"""Which device has which kernels: one table, filled when kernels are registered and asked by every check. Holds no arithmetic.

An operator ``tio::<name>`` has one schema and any number of kernels, one per device; torch's dispatcher takes the one of the tensors' device.
The CPU's are registered when an operator's folder is imported. Another family's lie beside them in ``kernels/<op>/<file>.py``, each of
which says what it offers::

    KERNELS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}      # operator without tio:: -> function with the operator's arguments

and :func:`load` registers them all. So a family is: a row in ``contract/families.py``, ``kernels/<file>_family.py`` with ``version()``, and
such files; no layer knows it. What a family lacks is refused by name on its device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from tio_megatron.contract import FAMILIES, Family
from tio_megatron.contract.families import family as family_of

KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""Dispatch keys of torch by device type."""

_operators = torch.library.Library("tio", "FRAGMENT")
_table: dict[str, dict[str, str]] = {}
_operator_of: dict[str, str] = {}
_loaded: set[str] = set()


def implement(operator: str, device: str, function: Callable[..., Any], *, family: str) -> None:
    """Register a kernel of ``tio::operator`` (already defined) for tensors on ``device``.

    Args:
        operator: without the namespace.
        device: torch device type, such as ``cuda``.
        function: takes the operator's arguments.
        family: whose kernel it is.

    Raises:
        ValueError: the device has a kernel of another family already, or torch has no dispatch key for it.
    """
    there = _table.setdefault(operator, {})
    if there.get(device, family) != family:
        raise ValueError(f"tio::{operator}: device {device} has the kernels of family {there[device]!r} in this process; {family!r} needs another process")
    if device not in there:
        _operators.impl(operator, function, _key(device))
        there[device] = family


def names(operator: str, *public: str) -> None:
    """Public functions that check for ``operator`` under names of their own."""
    _operator_of.update(dict.fromkeys(public, operator))


def devices(what: str) -> tuple[str, ...]:
    """Device types for which the operator, or the public function, ``what`` has a kernel in this process."""
    return tuple(sorted(_table.get(_operator_of.get(what, what), ())))


def serves(what: str, device: str) -> bool:
    """Whether ``what`` can be called with tensors on ``device``; ``meta`` has shapes alone, so always."""
    return device == "meta" or device in _table.get(_operator_of.get(what, what), ())


def family_on(what: str, device: str) -> Family | None:
    """The family whose kernel would run, if any."""
    name = _table.get(_operator_of.get(what, what), {}).get(device)
    return None if name is None else FAMILIES[name]


def supported(what: str, device: str) -> str:
    """The end of a refusal: the devices that have a kernel of ``what``, and what would bring one for ``device``."""
    words = f"no kernel for that device; supported here is {', '.join(devices(what)) or 'none'}"
    absent = sorted(name for name, family in FAMILIES.items() if family.device == device and name not in _loaded)
    if absent:
        words += f"; a contract of family {' or '.join(absent)} brings more (kernels.load)"
    return words


def load(name: str) -> Family:
    """Register the kernels of the family called ``name``. Doing it again is harmless; ``cpu`` is always there.

    Raises:
        ValueError: no such family, its package is not installed, or another family has its device in this process.
    """
    family = family_of(name)
    if name in _loaded or family.device == "cpu":
        return family
    if family.package is not None and importlib.util.find_spec(family.package) is None:
        raise ValueError(f"kernel family {name!r} needs the package {family.package}, which is not installed")
    package = importlib.import_module("tio_megatron.kernels")
    for folder in pkgutil.iter_modules(package.__path__):
        path = f"{package.__name__}.{folder.name}"
        if folder.ispkg and importlib.util.find_spec(f"{path}.{family.file}") is not None:
            for operator, function in importlib.import_module(f"{path}.{family.file}").KERNELS.items():
                implement(operator, family.device, function, family=name)
    _loaded.add(name)
    return family


@functools.cache
def version(name: str) -> str:
    """The version of a family's kernels, raised whenever their bytes change.

    Raises:
        ValueError: no such family.
    """
    file = family_of(name).file
    module = "library" if file == "cpu" else f"{file}_family"
    return str(importlib.import_module(f"tio_megatron.kernels.{module}").version())


def _key(device: str) -> str:
    if device in KEYS:
        return KEYS[device]
    if device == torch._C._get_privateuse1_backend_name():
        return "PrivateUse1"
    raise ValueError(f"device type {device!r} has no dispatch key here; known are {sorted(KEYS)}")
