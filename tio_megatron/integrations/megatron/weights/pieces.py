"""Which elements of which HF tensor each parameter of a Megatron model holds, in any layout.

Megatron fuses what HF keeps apart: queries, keys and values interleaved by group, gate and up per shard. Which tensors a parameter is made of, the
description of the model says (:mod:`tio_megatron.models`); :func:`pieces` cuts them, and loading and exporting both read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from tio_megatron.contract import ModelShape
from tio_megatron.models import Packing, Placed, Shard, TensorSpec, megatron_tensors


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` along ``axis`` of the HF tensor ``name``; ``view`` is this rank's memory of them."""

    name: str
    axis: int
    start: int
    stop: int
    view: torch.Tensor


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the groups that cut weights."""

    tp: int
    tp_rank: int
    etp: int
    etp_rank: int
    ep: int
    ep_rank: int

    @classmethod
    def current(cls) -> Place:
        """From Megatron's parallel state."""
        return cls(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )


def unwrap(model: Any) -> Any:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module).

    Raises:
        ValueError: a list of model chunks.
    """
    if isinstance(model, list | tuple):
        raise ValueError(
            f"the model is a list with {len(model)} model chunks: virtual pipeline stages are not supported here; a single chunk on each rank, without its "
            "list, would work"
        )
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def pieces(model: torch.nn.Module, shape: ModelShape, place: Place | None = None, values: Mapping[str, torch.Tensor] | None = None) -> Iterator[Piece]:
    """What this rank's parameters hold, parameter by parameter, or the tensors of ``values`` in their places. Vocabulary padding is in no piece.

    Raises:
        ValueError: a parameter has no HF counterpart, or another size than this layout gives it.
    """
    model, place = unwrap(model), place or Place.current()
    for parameter, weight in model.named_parameters():
        yield from pieces_of(parameter, weight if values is None else values[parameter], model, shape, place)


def tensor_names(model: torch.nn.Module, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, tuple[str, ...]]]:
    """Each parameter of this rank with the HF tensors it belongs to, a vocabulary shard that is all padding included."""
    model, place = unwrap(model), Place.current()
    for name, parameter in model.named_parameters():
        placed = _placed(name, model, shape, place)
        if placed.parameter.shard is Shard.VOCAB:
            yield parameter, (placed.specs[0].name,)
        else:
            yield parameter, tuple(piece.name for piece in pieces_of(name, parameter, model, shape, place))


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def pieces_of(name: str, weight: torch.Tensor, model: Any, shape: ModelShape, place: Place) -> Iterator[Piece]:
    """What ``weight``, in the place of the parameter ``name``, holds; see :func:`pieces`."""
    placed = _placed(name, model, shape, place)
    parts, index = (place.etp, place.etp_rank) if placed.parameter.of_experts else (place.tp, place.tp_rank)
    if placed.parameter.shard is Shard.VOCAB:
        yield from _vocabulary_rows(placed.specs[0], weight, place, name)
    elif placed.parameter.packing is Packing.GROUPED:
        yield from _groups(placed.specs, weight, shape, place, name)
    else:
        # A rank's shards lie below each other where several tensors are one parameter.
        for spec, shard in zip(placed.specs, weight.chunk(len(placed.specs)), strict=True):
            yield _cut(spec, shard, parts, index, name)


def _placed(name: str, model: Any, shape: ModelShape, place: Place) -> Placed:
    """The parameter ``name`` of this rank in the description of the model."""
    matched = _LAYER.match(name)
    # The stage's own numbering starts anew on every pipeline rank.
    layer = model.decoder.layers[int(matched[1])].layer_number - 1 if matched else None
    placed = megatron_tensors(shape, name[matched.end() :] if matched else name, layer, place.ep_rank * (shape.experts // place.ep))
    if placed is None:
        raise ValueError(f"{name}: no HF tensor is known for this parameter")
    return placed


def _cut(spec: TensorSpec, view: torch.Tensor, parts: int, index: int, name: str) -> Piece:
    """The ``index``-th of ``parts`` equal shards along the table's axis (all of it when the tensor is replicated)."""
    axis = spec.axis if spec.axis is not None else 0
    parts, index = (parts, index) if spec.axis is not None else (1, 0)
    expected = list(spec.shape)
    expected[axis] //= parts
    if spec.shape[axis] % parts or list(view.shape) != expected:
        raise ValueError(f"{name} is {list(view.shape)}, shard {index} of {parts} of {spec.name} {list(spec.shape)} was expected")
    return Piece(spec.name, axis, index * expected[axis], (index + 1) * expected[axis], view)


def _vocabulary_rows(spec: TensorSpec, weight: torch.Tensor, place: Place, name: str) -> Iterator[Piece]:
    rows, true_rows = weight.shape[0], spec.shape[0]
    if rows * place.tp < true_rows or weight.shape[1:] != spec.shape[1:]:
        raise ValueError(f"{name} is {list(weight.shape)} on each of {place.tp} ranks, {spec.name} is {list(spec.shape)}")
    start = place.tp_rank * rows
    stop = min(true_rows, start + rows)
    if start < stop:
        yield Piece(spec.name, 0, start, stop, weight[: stop - start])


def _groups(specs: tuple[TensorSpec, ...], weight: torch.Tensor, shape: ModelShape, place: Place, name: str) -> Iterator[Piece]:
    """Megatron interleaves by group: ``[queries of group 0; key 0; value 0; queries of group 1; ...]``, cut into equal runs of rows.

    With more ranks than groups a run ends inside a group, so runs and groups are intersected row by row range.
    """
    total = sum(spec.shape[0] for spec in specs)
    if weight.shape != (total // place.tp, *specs[0].shape[1:]) or total % place.tp:
        across = "".join(f" by {size}" for size in specs[0].shape[1:])
        raise ValueError(f"{name} is {list(weight.shape)}, shard {place.tp_rank} of {place.tp} of {total} rows{across} was expected")
    lo = place.tp_rank * weight.shape[0]
    at = 0
    for group in range(shape.kv_heads):
        for spec in specs:
            rows = spec.shape[0] // shape.kv_heads
            start, stop = max(at, lo), min(at + rows, lo + weight.shape[0])
            if start < stop:
                source = group * rows + start - at
                yield Piece(spec.name, 0, source, source + stop - start, weight[start - lo : stop - lo])
            at += rows
