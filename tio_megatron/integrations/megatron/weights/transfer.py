"""Weights between an HF folder and a Megatron model in any layout: load, and export back unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from tio_megatron.checkpoint import CheckpointConfig, TensorSpec, Weights, tensor_table
from tio_megatron.collectives import wire
from tio_megatron.integrations.megatron.weights.pieces import Piece, pieces, unwrap
from tio_megatron.models import vocabulary_parameters


def load_weights(model: torch.nn.Module, checkpoint: Weights) -> None:
    """Fill this rank's parameters from an HF folder, or from weights in memory; each rank reads only what it holds. Vocabulary padding becomes zero.

    Raises:
        ValueError: a parameter has no HF counterpart, or another size or dtype.
    """
    model = unwrap(model)
    shape = checkpoint.config.shape
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if str(parameter.dtype) != f"torch.{checkpoint.config.dtype}":
                raise ValueError(f"{name} is {parameter.dtype}, the checkpoint {checkpoint.config.dtype}; build the model with that params_dtype")
            if name in vocabulary_parameters():
                parameter.zero_()
        for piece in pieces(model, shape):
            piece.view.copy_(checkpoint.part(piece.name, piece.axis, piece.start, piece.stop).view(piece.view.shape))


def export_weights(
    model: torch.nn.Module,
    config: CheckpointConfig,
    *,
    destination: int | None = 0,
    values: Mapping[str, torch.Tensor] | None = None,
    before: Callable[[int], None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every HF tensor, whole and on the CPU, one at a time, in the order of the table.

    A collective over the world: every rank must exhaust the iterator, also those that get nothing. Bytes are moved, nothing is
    computed. Where several ranks hold the same elements, the lowest rank gives them.

    Args:
        model: this rank's model.
        config: the checkpoint's configuration.
        destination: the rank that gets the tensors (others get none), or None for every rank.
        values: tensors to export in place of the parameters, by the parameter's name, of its shape and of ``config``'s type.
        before: called on every rank before each tensor with its bytes; what it raises on every rank ends the export.

    Raises:
        ValueError: some elements are held by no rank, or ranks overlap.
    """
    held = list(pieces(model, config.shape, values=values))
    mine = {(piece.name, piece.start): piece.view for piece in held}
    owners = _owners(held)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dtype = getattr(torch, config.dtype)
    receives = destination is None or destination == rank
    for name, spec in tensor_table(config.shape).items():
        if before is not None:
            before(spec.numel * dtype.itemsize)
        whole = torch.empty(spec.shape, dtype=dtype) if receives else None
        for axis, start, stop, owner in _covering(spec, owners.get(name, {})):
            part = mine[name, start].detach() if owner == rank else None
            target = whole.narrow(axis, start, stop - start) if whole is not None else None
            if part is not None:
                part = part.reshape(_shape_of(spec, axis, start, stop))
            if world > 1 and owner != destination:
                part = _moved(part, _shape_of(spec, axis, start, stop), dtype, owner, destination, rank)
            if target is not None and part is not None:
                target.copy_(part)
        if whole is not None:
            yield name, whole


def _owners(held: list[Piece]) -> dict[str, dict[int, tuple[int, int, int]]]:
    """HF name -> start -> (axis, stop, lowest rank that holds these elements), the same on every rank."""
    ranges = [(piece.name, piece.axis, piece.start, piece.stop) for piece in held]
    everyone = [ranges]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, ranges)
    owners: dict[str, dict[int, tuple[int, int, int]]] = {}
    for rank, theirs in enumerate(everyone):
        for name, axis, start, stop in theirs:
            owners.setdefault(name, {}).setdefault(start, (axis, stop, rank))
    return owners


def _covering(spec: TensorSpec, found: dict[int, tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """``(axis, start, stop, owner)`` of the pieces of one tensor, ascending; they must tile it."""
    at, tiles = 0, []
    for start, (axis, stop, owner) in sorted(found.items()):
        if start != at:
            raise ValueError(f"{spec.name}: elements from {at} on are held by no rank, or ranks overlap at {start}")
        tiles.append((axis, start, stop, owner))
        at = stop
    if at != spec.shape[tiles[0][0] if tiles else 0]:
        raise ValueError(f"{spec.name}: elements from {at} on are held by no rank")
    return tiles


def _shape_of(spec: TensorSpec, axis: int, start: int, stop: int) -> tuple[int, ...]:
    return (*spec.shape[:axis], stop - start, *spec.shape[axis + 1 :])


def _moved(part: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, owner: int, destination: int | None, rank: int) -> torch.Tensor | None:
    """The owner's elements on the destination (None: on every rank), as bytes; None where they are not needed."""
    if destination is not None and rank not in (owner, destination):
        return None
    # gloo sends what lies on the host, NCCL and HCCL what lies on their device.
    device = wire.device(dist.group.WORLD)
    part = torch.empty(shape, dtype=dtype, device=device) if part is None else part.to(device).contiguous()
    flat = part.view(-1).view(torch.uint8)
    if destination is None:
        dist.broadcast(flat, owner)
    elif rank == owner:
        dist.send(flat, destination)
    else:
        dist.recv(flat, owner)
    return part
