"""Which options of a model, an optimizer and a schedule decide the bytes of the steps to come: what two runs must share to be one.

Options that the contract refuses are not here (they have one value), nor are those that only cut the work (layout, recomputation, dispatcher,
grouping of experts, overlap, buckets, sharding of the optimizer) or only make the first weights.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import ModelShape
from tio_megatron.integrations.megatron.applied import build
from tio_megatron.integrations.megatron.applied.moe_refusals import balance_coefficient
from tio_megatron.integrations.megatron.resume.optimizer_state import group_of, optimizers
from tio_megatron.integrations.megatron.weights.pieces import tensor_names, unwrap

Kind = tuple[float, float]
"""What tells parameter groups apart: the factors of weight decay and of the learning rate."""
PLAIN: Kind = (1.0, 1.0)
OWN = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What a group may have in place of the schedule's."""
HELD = ("betas", "eps", *OWN)
"""Numbers of a group that must be the same; its rate and weight decay go on from the checkpoint."""


def model_fields(model: torch.nn.Module, config: CheckpointConfig) -> dict[str, Any]:
    """Of the model, what decides a byte of its forward pass.

    Raises:
        ValueError: ``config`` describes another model than this one, with the fields.
    """
    fields = dataclasses.asdict(config.shape) | {"dtype": config.dtype, "rms_eps": config.rms_eps, "rope_theta": config.rope_theta}
    fields["normalise"] = config.normalise
    del fields["architecture"]  # the configuration beside a state says it, and states of earlier versions do not
    built = _built(model)
    lines = [f"{name}: {fields[name]} / {value}" for name, value in built.items() if fields[name] != value]
    if lines:
        raise ValueError(f"config does not describe the model (config / model): {'; '.join(lines)}; give the configuration the model was built from")
    scale = unwrap(model).config.softmax_scale
    return plain("model", fields | {"softmax_scale": config.shape.head_dim**-0.5 if scale is None else float(scale)})


def training_fields(model: torch.nn.Module) -> dict[str, Any]:
    """Of the model's configuration, what decides a byte of its gradients alone."""
    config = unwrap(model).config
    finalize = config.finalize_model_grads_func
    while isinstance(finalize, functools.partial):
        finalize = finalize.func
    return {
        "moe_aux_loss_coeff": balance_coefficient(config),
        "calculate_per_token_loss": bool(config.calculate_per_token_loss),
        "finalize_model_grads_func": None if finalize is None else getattr(finalize, "__qualname__", type(finalize).__qualname__),
    }


def schedule_fields(schedule: Any) -> dict[str, Any] | None:
    """All that a schedule's rates follow from. Its own state leaves out the first rate and how WSD decays."""
    if schedule is None:
        return None
    more = {name: getattr(schedule, name, None) for name in ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")}
    return plain("schedule", more | schedule.state_dict())


def optimizer_fields(optimizer: Any, schedule: Any) -> dict[str, Any]:
    """Of the optimizer, what is the same for all groups. Without a schedule, the rate and the weight decay it was built with too."""
    parts = optimizers(optimizer)
    modes = {bool(part.optimizer.adam_w_mode) for part in parts if getattr(part, "optimizer", None) is not None}
    config = parts[0].config
    fields = {"clip_grad": float(config.clip_grad), "adam_w_mode": True in modes}
    return fields if schedule is not None else fields | {"lr": _number(config.lr), "weight_decay": _number(config.weight_decay)}


def group_dicts(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups of all parts."""
    for part in optimizers(optimizer):
        if getattr(part, "optimizer", None) is not None:
            yield from part.optimizer.param_groups


def kind_of(group: Mapping[str, Any]) -> Kind:
    """Which kind a parameter group is."""
    return float(group.get("wd_mult", 1.0)), float(group.get("lr_mult", 1.0))


def group_rows(optimizer: Any, schedule: Any) -> Iterator[dict[str, Any]]:
    """The numbers of every group. ``max_lr`` and its like are null where the schedule's hold."""
    for group in group_dicts(optimizer):
        wd_mult, lr_mult = kind_of(group)
        numbers = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
        own = {name: None if schedule is None or group.get(name) == getattr(schedule, name, None) else _number(group.get(name)) for name in OWN}
        yield {"wd_mult": wd_mult, "lr_mult": lr_mult, "betas": [float(b) for b in group["betas"]], "step": int(group["step"]), **numbers, **own}


def tensor_kinds(model: torch.nn.Module, optimizer: Any, shape: ModelShape) -> dict[str, Kind]:
    """The kind of group that steps each HF tensor this rank's optimizers hold elements of."""
    held = [find for part in optimizers(optimizer) if (find := group_of(part)) is not None]
    found: dict[str, Kind] = {}
    for parameter, names in tensor_names(model, shape):
        group = next((group for find in held if (group := find(parameter)) is not None), None)
        if group is not None:
            found |= dict.fromkeys(names, kind_of(group))
    return found


def plain(what: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """``value`` as JSON gives it back.

    Raises:
        ValueError: something in it is none of JSON's types.
    """
    try:
        return json.loads(json.dumps({} if value is None else dict(value), default=_path))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: only JSON's types can be saved ({error})") from error


def _built(model: torch.nn.Module) -> dict[str, Any]:
    """What a model was really built with, by the names of a checkpoint's configuration."""
    inner = unwrap(model)
    config = inner.config
    found = {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "vocab": build.true_vocab(inner.vocab_size),
        "experts": config.num_moe_experts or 0,
        "tied": bool(inner.share_embeddings_and_output_weights),
        "dtype": str(config.params_dtype).removeprefix("torch."),
        "rms_eps": config.layernorm_epsilon,
        "rope_theta": inner.rotary_base,
    }
    if not config.num_moe_experts:
        return found | {"ffn": config.ffn_hidden_size}
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    return found | {"top_k": config.moe_router_topk, "moe_ffn": width, "normalise": not config.moe_router_pre_softmax}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _path(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not one of them")
