"""The optimizer's tensors, unsharded and by HF name: fp32 main parameters and both moments, whatever optimizer and layout hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tio_megatron.checkpoint import Checkpoint, CheckpointConfig
from tio_megatron.integrations.megatron.weights.pieces import Place, pieces_of, unwrap
from tio_megatron.integrations.megatron.weights.transfer import export_weights

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""The main parameter and its first and second moment."""


def export_state(
    model: torch.nn.Module, optimizer: Any, config: CheckpointConfig, kind: str, *, destination: int | None = 0, before: Callable[[int], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of one ``kind``, fp32, whole and on the CPU, in the order of :func:`export_weights`.

    A collective over the world: every rank must exhaust the iterator. Bytes are moved, nothing is computed. One kind of this rank's
    parameters is in memory at a time. Moments are zero before the first step.

    Args:
        model: this rank's model, in DDP or bare.
        optimizer: what ``get_megatron_optimizer`` gave.
        config: the checkpoint's configuration.
        kind: one of :data:`KINDS`.
        destination: as in :func:`export_weights`.
        before: as in :func:`export_weights`.

    Raises:
        ValueError: an unknown kind, or a parameter that no optimizer holds.
    """
    _check(kind)
    inner = unwrap(model)
    parts = optimizers(optimizer)
    held = {}
    for name, parameter in inner.named_parameters():
        value = next((found for part in parts if (found := _local(part, parameter, kind)) is not None), None)
        if value is None:
            raise _nobody(name)
        held[name] = value
    yield from export_weights(inner, replace(config, dtype="float32"), destination=destination, values=held, before=before)


def import_state(model: torch.nn.Module, optimizer: Any, kind: str, saved: Checkpoint) -> None:
    """The inverse of :func:`export_state`: every element of one ``kind`` that this rank's optimizers hold, from a folder of fp32 tensors.

    Each rank reads what it holds; no collective. Padding of the vocabulary becomes zero.

    Args:
        model: this rank's model, in DDP or bare.
        optimizer: what ``get_megatron_optimizer`` gave.
        kind: one of :data:`KINDS`.
        saved: the tensors of that kind, under the names and in the shapes of the weights.

    Raises:
        ValueError: an unknown kind, tensors that are not fp32, or a parameter that no optimizer holds.
    """
    _check(kind)
    if saved.config.dtype != "float32":
        raise ValueError(f"optimizer state: {saved.path} holds {saved.config.dtype}, main parameters and moments are float32")
    inner, parts = unwrap(model), optimizers(optimizer)
    shape, place = saved.config.shape, Place.current()
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            whole = torch.zeros(parameter.shape, dtype=torch.float32)
            for piece in pieces_of(name, whole, inner, shape, place):
                piece.view.copy_(saved.part(piece.name, piece.axis, piece.start, piece.stop).view(piece.view.shape))
            if not any(_put(part, parameter, kind, whole) for part in parts):
                raise _nobody(name)


def optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def group_of(optimizer: Any) -> Callable[[torch.nn.Parameter], Mapping[str, Any] | None] | None:
    """Which parameter group of one optimizer steps a parameter: a function that says so, ``None`` for a parameter (or all) it holds nothing of here."""
    if getattr(optimizer, "is_stub_optimizer", False) or optimizer.optimizer is None:
        return None
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        places = optimizer.model_param_group_index_map
        return lambda parameter: groups[places[parameter][0]] if parameter in places else None
    held = {id(main): group for group in groups for main in group["params"]}

    def find(parameter: torch.nn.Parameter) -> Mapping[str, Any] | None:
        main = getattr(parameter, "main_param", None)
        return held.get(id(parameter if main is None else main))

    return find


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"optimizer state: {kind!r} is none of {', '.join(KINDS)}")


def _nobody(name: str) -> ValueError:
    return ValueError(f"optimizer state: {name} is held by no optimizer (is it frozen?)")


def _put(optimizer: Any, parameter: torch.nn.Parameter, kind: str, whole: torch.Tensor) -> bool:
    """Write this rank's shard of a parameter; False when another optimizer of the chain holds it."""
    if isinstance(optimizer, DistributedOptimizer):
        if not _shards(optimizer, parameter):
            return False
        if parameter in optimizer.model_param_group_index_map:
            main, owned = _slice(optimizer, parameter)
            _write(optimizer.optimizer, main, kind, whole.view(-1)[owned.start : owned.end])
        return True
    held = _main(optimizer, parameter)
    if held is None:
        return False
    _write(optimizer.optimizer, held, kind, whole)
    return True


def _write(inner: Any, main: torch.Tensor, kind: str, value: torch.Tensor) -> None:
    if kind == "param":
        main.data.copy_(value)
        return
    state = inner.state[main]
    if kind in state:
        state[kind].copy_(value)
    else:
        state[kind] = value.to(main.device).reshape(main.shape).clone(memory_format=torch.contiguous_format)


def _local(optimizer: Any, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor | None:
    """All of this rank's shard of a parameter, or None when another optimizer of the chain holds it."""
    if isinstance(optimizer, DistributedOptimizer):
        return _gathered(optimizer, parameter, kind) if _shards(optimizer, parameter) else None
    main = _main(optimizer, parameter)
    return None if main is None else _of(optimizer.optimizer, main, kind)


def _shards(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> bool:
    """Whether a distributed optimizer has this parameter, on this rank or on another of its group."""
    return not getattr(optimizer, "is_stub_optimizer", False) and any(parameter in buffer.param_index_map for buffer in optimizer.buffers)


def _slice(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, Any]:
    """This rank's slice of a parameter and its range in the flat parameter."""
    group, order = optimizer.model_param_group_index_map[parameter]
    return optimizer.optimizer.param_groups[group]["params"][order], optimizer._get_model_param_range_map(parameter)["param"]


def _main(optimizer: Any, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The fp32 tensor that an optimizer steps for a parameter, or None when it does not have it."""
    if optimizer.optimizer is None:
        return None
    main = getattr(parameter, "main_param", None)
    main = parameter if main is None else main
    return main if any(main is held for group in optimizer.optimizer.param_groups for held in group["params"]) else None


def _of(inner: Any, main: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "param":
        return main.detach()
    found = inner.state.get(main, {}).get(kind)
    return torch.zeros_like(main) if found is None else found


def _gathered(optimizer: Any, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    """The data-parallel ranks' slices of a flat parameter: each element has one owner, so integers are added to zeros."""
    whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    if parameter in optimizer.model_param_group_index_map:
        main, owned = _slice(optimizer, parameter)
        whole.view(-1)[owned.start : owned.end] = _of(optimizer.optimizer, main, kind)
    dist.all_reduce(whole.view(torch.int32), group=optimizer.data_parallel_group)
    return whole
