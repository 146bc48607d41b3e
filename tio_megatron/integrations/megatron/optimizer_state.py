"""The optimizer's tensors, unsharded and by HF name: fp32 main parameters and both moments, whatever optimizer and layout hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.integrations.megatron.pieces import unwrap
from tio_megatron.integrations.megatron.weights import export_weights

KINDS = ("param", "exp_avg", "exp_avg_sq")
"""The main parameter and its first and second moment."""


def export_state(
    model: torch.nn.Module, optimizer: Any, config: CheckpointConfig, kind: str, *, destination: int | None = 0
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

    Raises:
        ValueError: an unknown kind, or a parameter that no optimizer holds.
    """
    if kind not in KINDS:
        raise ValueError(f"optimizer state: {kind!r} is none of {', '.join(KINDS)}")
    inner = unwrap(model)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    held = {}
    for name, parameter in inner.named_parameters():
        value = next((found for part in parts if (found := _local(part, parameter, kind)) is not None), None)
        if value is None:
            raise ValueError(f"optimizer state: {name} is held by no optimizer (is it frozen?)")
        held[name] = value
    yield from export_weights(inner, replace(config, dtype="float32"), destination=destination, values=held)


def _local(optimizer: Any, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor | None:
    """All of this rank's shard of a parameter, or None when another optimizer of the chain holds it."""
    if isinstance(optimizer, DistributedOptimizer):
        if getattr(optimizer, "is_stub_optimizer", False) or not any(parameter in buffer.param_index_map for buffer in optimizer.buffers):
            return None
        return _gathered(optimizer, parameter, kind)
    inner = optimizer.optimizer
    if inner is None:
        return None
    main = getattr(parameter, "main_param", None)
    main = parameter if main is None else main
    if not any(main is held for group in inner.param_groups for held in group["params"]):
        return None
    return _of(inner, main, kind)


def _of(inner: Any, main: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "param":
        return main.detach()
    found = inner.state.get(main, {}).get(kind)
    return torch.zeros_like(main) if found is None else found


def _gathered(optimizer: Any, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    """The data-parallel ranks' slices of a flat parameter: each element has one owner, so integers are added to zeros."""
    whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    if parameter in optimizer.model_param_group_index_map:
        group, order = optimizer.model_param_group_index_map[parameter]
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        whole.view(-1)[owned.start : owned.end] = _of(optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][order], kind)
    dist.all_reduce(whole.view(torch.int32), group=optimizer.data_parallel_group)
    return whole
