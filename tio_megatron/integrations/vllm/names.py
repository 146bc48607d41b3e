"""The model's weights as whole HF tensors: what digests are taken of and a checkpoint holds, whatever this engine's layout.

Every rank of the tensor-parallel group walks the same tensors in the same order, since a cut tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed import get_tp_group

from tio_megatron.models import Packing, Placed, Shard, parameters, tensor_table


def whole_tensors(model: Any, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every HF name of ``names`` (all by default) with its whole tensor on one rank of the group and ``None`` on the others.

    A cut or repeated tensor is whole on the group's first rank; an expert that is not cut, on the rank that holds it.

    Raises:
        ValueError: a name is none of the model's.
    """
    table = tensor_table(model.shape)
    unknown = sorted((names or set()) - table.keys())
    if unknown:
        raise ValueError(f"the model has no tensor {', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}")
    wanted = table.keys() if names is None else names
    # All experts of a layer are two parameters of vLLM: what one expert has unpacked serves the next.
    owner, unpacked = None, dict[str, torch.Tensor]()
    for placed in parameters(model.shape):
        if not any(spec.name in wanted for spec in placed.specs):
            continue
        path, _, name = placed.vllm.rpartition(".")
        layer = model.get_submodule(path)
        if layer is not owner:
            owner, unpacked = layer, {}
        if name not in unpacked:
            unpacked[name] = _unpacked(layer, name)
        for spec, whole in zip(placed.specs, _whole(placed, layer, unpacked[name]), strict=True):
            if spec.name in wanted:
                yield spec.name, whole


def _unpacked(layer: Any, name: str) -> torch.Tensor:
    """This rank's rows of a parameter, as vLLM's loader would have left them."""
    slots = layer.__dict__.get("slots", {})
    held: torch.Tensor = getattr(layer, slots[name][0]).unpack() if name in slots else getattr(layer, name).data
    return held


def _whole(placed: Placed, layer: Any, rows: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Each tensor of a parameter of which this rank has ``rows``; the whole one on one rank."""
    parameter, shard = placed.parameter, placed.parameter.shard
    axis = 1 if shard is Shard.ROW else 0
    if parameter.of_experts:
        (lo, hi), cut, number = layer.span, layer.etp_group is not None, placed.specs[0].expert
        assert number is not None
        if not lo <= number < hi:
            yield from [None] * len(placed.specs)
            return
        for part in rows[number - lo].chunk(len(placed.specs)):
            # Experts that nobody cuts and nobody shares out are on every rank of no group: one rank, whole.
            yield _gather(part, axis) if cut else part
    elif shard is Shard.REPLICATED:
        yield _first(rows)
    elif shard is Shard.VOCAB:
        whole = _gather(rows, 0)
        yield None if whole is None else whole[: layer.org_vocab_size]
    elif parameter.packing is Packing.GROUPED:
        heads, copies = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), layer.num_kv_head_replicas
        for part, step in zip(rows.split([count * layer.head_size for count in heads]), (1, copies, copies), strict=True):
            yield _gather(part, 0, step)
    else:
        for part in rows.chunk(len(placed.specs)):
            yield _gather(part, axis)


def _first(tensor: torch.Tensor) -> torch.Tensor | None:
    """A repeated tensor, on the first rank only."""
    return tensor if get_tp_group().rank_in_group == 0 else None


def _gather(shard: torch.Tensor, axis: int, step: int = 1) -> torch.Tensor | None:
    """The shards of every ``step``-th rank side by side, on the group's first rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return shard
    shards = _gather_bytes(shard.contiguous(), group)
    return None if shards is None else torch.cat(shards[::step], dim=axis)


def _gather_bytes(tensor: torch.Tensor, group: Any) -> list[torch.Tensor] | None:
    flat = tensor.reshape(-1).view(torch.uint8)
    first = group.rank_in_group == 0
    parts = [torch.empty_like(flat) for _ in range(group.world_size)] if first else None
    torch.distributed.gather(flat, parts, dst=group.ranks[0], group=group.device_group)
    return None if parts is None else [part.view(tensor.dtype).view(tensor.shape) for part in parts]
