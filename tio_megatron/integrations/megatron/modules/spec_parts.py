"""The parts that a layer spec names: their classes, their own parts, and how one that has no ordered form is refused."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from tio_megatron.integrations.megatron.modules import te_forms
from tio_megatron.integrations.mindspeed.manager import stock


def part_class(part: Any) -> Any:
    """The class that ``part`` of a spec builds: of a ``ModuleSpec``, of a partial call of the class or of one of its class methods, or itself."""
    if isinstance(part, functools.partial):
        return getattr(part.func, "__self__", part.func)
    return part.module if isinstance(part, ModuleSpec) else part


def part_submodules(part: Any) -> Any:
    """The submodules that ``part`` of a spec names; None where it names none."""
    return part.keywords.get("submodules") if isinstance(part, functools.partial) else getattr(part, "submodules", None)


def require(part: Any, where: str, classes: Collection[Any], te_names: Collection[str] = ()) -> None:
    """Refuse a part whose class is none of ``classes`` itself (a subclass may compute another thing), nor one of megatron-core's on Transformer Engine
    called one of ``te_names``. Under MindSpeed both the part and the classes may be its stand-ins.

    Raises:
        ValueError: names the class and its place.
    """
    module = part_class(part)
    if stock(module) not in {stock(one) for one in classes} and te_forms.named(module) not in te_names:
        raise unknown(module, where)


def without_params(part: Any, where: str, known: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Refuse parameters that ``part`` of a spec brings and its ordered form would not be given; ``known`` may be said.

    Raises:
        ValueError: names them.
    """
    given = part.params if isinstance(part, ModuleSpec) else {}
    if strange := sorted(name for name, value in (given or {}).items() if name not in known or known[name] != value):
        raise ValueError(f"layer spec: params of {where} ({', '.join(map(str, strange))}) are not handed on to its ordered form; leave them out")


def unknown(module: Any, where: str) -> ValueError:
    """The error about a part that has no ordered form."""
    if te_forms.is_mock(module):
        return ValueError(f"layer spec: {where} is a Transformer Engine part, and Transformer Engine is not installed; use get_gpt_layer_local_spec")
    name = getattr(module, "__name__", repr(module))
    return ValueError(f"layer spec: {name} as {where} has no ordered form; use get_gpt_layer_local_spec or tio_megatron's gpt_layer_spec")
