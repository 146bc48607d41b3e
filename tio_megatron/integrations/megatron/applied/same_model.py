"""Whether all ranks build the same model: one rank with another epsilon would have other numbers. Compares; holds no arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from tio_megatron.findings.finding import refuse
from tio_megatron.integrations import handshake


def facts(config: Any) -> dict[str, str]:
    """What must be the same on every rank of a model's configuration: its numbers, words and dtypes, by name."""
    simple = (bool, int, float, str, torch.dtype, type(None))
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {f"model's {name}": str(value) for name, value in found.items() if isinstance(value, simple)}


def require(config: Any) -> None:
    """Compare the :func:`facts` of ``config`` over all ranks of the world. Every rank must call it.

    Raises:
        ValueError: on every rank, naming each rank that differs from most, the field and both values.
    """
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts(config))
    refuse("ranks run different models, so their numbers would differ", handshake.unusual(everyone, [f"rank {rank}" for rank in range(len(everyone))]))
