"""Which architectures are described, and the description of a model whose ``config.json`` or sizes are known."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tio_megatron.contract import ModelShape
from tio_megatron.findings.messages import shown
from tio_megatron.models import qwen3_moe
from tio_megatron.models.description import Architecture, Shard

EXAMPLE = next(iter(qwen3_moe.MODEL.published))
"""A published model, for messages."""


@cache
def architectures() -> Mapping[str, Architecture]:
    """Every description by its architecture's name: the ``MODEL`` of each file of this room that has one."""
    modules = (importlib.import_module(f"{__package__}.{found.name}") for found in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return {module.MODEL.name: module.MODEL for module in modules if hasattr(module, "MODEL")}


def architecture_of(shape: ModelShape) -> Architecture:
    """The description of a model.

    Raises:
        ValueError: ``shape`` names no architecture, or one that is not described.
    """
    if shape.architecture not in architectures():
        raise ValueError(f"model: architecture is {shown(shape.architecture)}, described are {sorted(architectures())}")
    return architectures()[shape.architecture]


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Sizes from the contents of an HF ``config.json``.

    Raises:
        ValueError: a field is missing or no whole number, or the architecture is not described.
    """
    names, known = config.get("architectures") or [], architectures()
    if not isinstance(names, list | tuple) or list(names) not in [[name] for name in known]:
        raise ValueError(f"config.json: architectures is {shown(names)}, supported are {sorted([name] for name in known)}")
    described = known[names[0]]
    keys = {}
    for field, key in described.sizes.items():
        choices = (key,) if isinstance(key, str) else key
        keys[field] = next((choice for choice in choices if choice in config), choices[0])
    missing = [key for key in keys.values() if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json: missing {', '.join(missing)}")
    wrong = [key for key in keys.values() if type(config[key]) is not int]
    if wrong:
        raise ValueError(f"config.json: not whole numbers: {', '.join(f'{key} = {shown(config[key])}' for key in wrong)}")
    sizes = {field: config[key] for field, key in keys.items()}
    return ModelShape(**sizes, tied=bool(config.get("tie_word_embeddings", False)), architecture=described.name)


def moe_layers(shape: ModelShape) -> list[bool]:
    """Of each layer, whether it has experts."""
    return [bool(shape.experts)] * shape.layers


def published() -> dict[str, tuple[ModelShape, Mapping[str, Any]]]:
    """Models that people know by name: sizes, and what else their files say."""
    return {
        name: (replace(shape, architecture=described.name), described.published_facts)
        for described in architectures().values()
        for name, shape in described.published.items()
    }


def published_model(name: str) -> tuple[ModelShape, Mapping[str, Any]] | None:
    """What is known of a model by its name, with or without its publisher's before it."""
    for described in architectures().values():
        if found := published().get(name.removeprefix(f"{described.publisher}/")):
            return found
    return None


def row_axis(module: str) -> str | None:
    """The field of ``Cuts`` on which vLLM's layer ``module``, which is cut by rows, is summed; None where no description has the layer."""
    for described in architectures().values():
        for block in (described.attention, described.dense):
            for parameter in block.parameters if block else ():
                if parameter.shard is Shard.ROW and f".{module}.weight".endswith(f".{parameter.vllm}"):
                    return parameter.axis
    return None
