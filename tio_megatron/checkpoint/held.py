"""Weights that never touch a disk, read like those of an HF folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from tio_megatron.checkpoint.config import CheckpointConfig, CheckpointError
from tio_megatron.checkpoint.reader import require_window
from tio_megatron.models import tensor_table


class Weights(Protocol):
    """What a model is filled from: a :class:`~tio_megatron.checkpoint.Checkpoint`, or :class:`HeldWeights`."""

    config: CheckpointConfig

    def part(self, name: str, axis: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements ``[start, stop)`` along ``axis`` of a tensor; the whole of it without an axis."""
        ...


class HeldWeights:
    """A model's weights in memory.

    Args:
        config: the contents of ``config.json``.
        tensors: every tensor of the model by HF name, whole and in the dtype that ``config`` names.

    Raises:
        CheckpointError: the configuration is not covered, or a tensor is missing, extra, or of another shape or dtype.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.config = CheckpointConfig.from_dict(config)
        self._tensors = dict(tensors)
        table, dtype = tensor_table(self.config.shape), getattr(torch, self.config.dtype)
        if wrong := sorted(table.keys() ^ self._tensors.keys()):
            raise CheckpointError(f"held weights: {len(wrong)} tensors missing or without a place, among them {wrong[0]}")
        for name, spec in table.items():
            held = self._tensors[name]
            if (tuple(held.shape), held.dtype) != (spec.shape, dtype):
                raise CheckpointError(f"held weights: {name} is {list(held.shape)} of {held.dtype}, the configuration makes it {list(spec.shape)} of {dtype}")

    def part(self, name: str, axis: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements ``[start, stop)`` along ``axis`` of a tensor; the whole of it without an axis.

        Raises:
            KeyError: the model has no such tensor.
            ValueError: the tensor has no such elements.
        """
        held = self._tensors[name]
        if axis is None:
            return held
        require_window(name, tuple(held.shape), axis, start, stop)
        return held.narrow(axis, start, (held.shape[axis] if stop is None else stop) - start)
