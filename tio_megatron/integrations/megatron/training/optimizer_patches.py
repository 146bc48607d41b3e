"""Patches that put our Adam, gradient norm and clipping into megatron-core's optimizers, whatever package it had found for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tio_megatron.integrations.megatron.applied import same_model
from tio_megatron.integrations.megatron.training import grad_norm, optimizer_refusals
from tio_megatron.integrations.patching import Patch
from tio_megatron.layers.optimizer import Adam

OPTIMIZERS = "megatron.core.optimizer"
MIXED = f"{OPTIMIZERS}.optimizer"
SHARDED = f"{OPTIMIZERS}.distrib_optimizer"

FOUND_FIRST = ("transformer_engine", "apex")
"""Where megatron-core takes its Adam from, if it can."""


def optimizer_patches() -> list[Patch]:
    """All of them. Wrappers (main parameters, sharding, checkpoints, scheduling) stay stock."""
    found = "it was bound on import to whichever of Transformer Engine, apex and torch was found first"
    counted = "our Adam counts steps in its groups, as the fused ones do; torch's counts them for each parameter"
    return [
        Patch(f"{OPTIMIZERS}:Adam", _always(Adam), why=found, binds=FOUND_FIRST),
        Patch(f"{SHARDED}:Adam", _always(Adam), why="the distributed optimizer takes only this class", binds=FOUND_FIRST),
        Patch(f"{OPTIMIZERS}:USING_PYTORCH_OPTIMIZER", _always(False), why="else torch's own classes are taken"),
        Patch(f"{SHARDED}:HAVE_APEX_OR_TE", _always(True), why=counted),
        Patch(f"{SHARDED}:USING_APEX_OPTIMIZER", _always(True), why=counted),
        Patch(f"{OPTIMIZERS}:check_config_overrides_consistency", check_build, why="get_megatron_optimizer calls it once, first"),
        Patch(f"{OPTIMIZERS}:_get_param_groups_and_buffers", check_model, why="the first place that sees the model and its data parallelism"),
        Patch(f"{OPTIMIZERS}.layer_wise_optimizer:LayerWiseDistributedOptimizer.__init__", refuse("the layer-wise optimizer"), why="it reduces norms itself"),
        Patch(f"{OPTIMIZERS}.muon:TensorParallelMuon.__init__", refuse("Muon"), why="its products have no fixed order"),
        Patch(f"{MIXED}:get_grad_norm_fp32", grad_norm.grad_norm_fp32, why="every optimizer reads this name"),
        Patch(f"{OPTIMIZERS}.clip_grads:get_grad_norm_fp32", grad_norm.grad_norm_fp32, why="where others import it from"),
        Patch(f"{MIXED}:ChainedOptimizer.get_grad_norm", grad_norm.chained_grad_norm, why="it adds rounded norms"),
        Patch(f"{MIXED}:ChainedOptimizer.step_with_ready_grads", grad_norm.step_unless_skipped, why="the last place before weights change"),
        Patch(f"{MIXED}:clip_grad_by_total_norm_fp32", grad_norm.clip_by_norm, why="every optimizer reads this name"),
        Patch(f"{OPTIMIZERS}.clip_grads:clip_grad_by_total_norm_fp32", grad_norm.clip_by_norm, why="where others import it from"),
    ]


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def check_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """``check_config_overrides_consistency``: refuse options that the contract cannot obey."""

    @functools.wraps(original)
    def check_config_overrides_consistency(config: Any, config_overrides: Any) -> Any:
        optimizer_refusals.check_optimizer(config)
        return original(config, config_overrides)

    return check_config_overrides_consistency


def check_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_get_param_groups_and_buffers``: refuse data parallelism that the contract cannot obey, and tell sharded weights apart from copies."""

    @functools.wraps(original)
    def _get_param_groups_and_buffers(model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        from tio_megatron.integrations.megatron.training.shards import tag_shards

        if model_chunks and dataclasses.is_dataclass(model_chunks[0].config):
            same_model.require(model_chunks[0].config)
        for chunk in model_chunks:
            optimizer_refusals.check_ddp(chunk.ddp_config, [parameter.dtype for parameter in chunk.parameters()])
            tag_shards(chunk)
        return original(model_chunks, *args, **kwargs)

    return _get_param_groups_and_buffers


def refuse(what: str) -> Callable[[Any], Any]:
    """A class that may not be built under a contract."""

    def build(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            raise ValueError(f"{what} cannot obey the contract: no other optimizer than Adam has a kernel; optimizer='adam' would work")

        return __init__

    return build
