"""Every patch of DeepSpeed, with why it is there. They wait until their modules are imported; other releases are refused then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
LAYERS = "deepspeed.module_inject.layers"
HERE = "tio_megatron.integrations.deepspeed"


def deepspeed_patches() -> list[Patch]:
    """All of them."""
    rows = (
        (f"{ENGINE}._do_sanity_check", "engine:check", "the configuration is read, the model untouched"),
        (f"{ENGINE}._configure_distributed_model", "engine:prepare", "AutoTP has cut the model, nothing is built on it yet"),
        (f"{ENGINE}._configure_basic_optimizer", "optimizer:basic_optimizer", "the one place that makes an optimizer from the configuration"),
        (f"{ENGINE}._do_optimizer_sanity_check", "optimizer:sanity_check", "it chooses the class that shards the optimizer"),
        (f"{ENGINE}._configure_optimizer", "engine:configure_optimizer", "parameters and their groups are known; hooks are set"),
        (f"{ENGINE}.backward", "engine:backward", "it divides the loss by the number of micro-batches on this rank"),
        (f"{ENGINE}._backward_prologue", "engine:backward_prologue", "every way into a backward pass goes through it"),
        (f"{ENGINE}.no_sync", "engine:no_sync", "micro-batches inside it are not counted"),
        (f"{ENGINE}.compile", "engine:compiled", "nobody has looked at the graphs"),
        (f"{ENGINE}.allreduce_gradients", "engine:allreduce_gradients", "the one place where ZeRO-0, 1 and 2 add gradients over ranks"),
        (f"{ENGINE}.clip_fp32_gradients", "optimizer:plain_clip", "the norm of ZeRO-0"),
        (f"{ENGINE}.save_checkpoint", "engine:save_checkpoint", "the grid of the next step belongs to a checkpoint"),
        (f"{ENGINE}.load_checkpoint", "engine:load_checkpoint", "the same"),
        (f"{ZERO}.scaled_global_norm", "optimizer:zero_norm", "it adds rounded norms, each of a piece that depends on the partition"),
        (f"{ZERO}.unscale_and_clip_grads", "optimizer:zero_clip", "clipping by one coefficient, as in ZeRO-0"),
        ("deepspeed.module_inject.auto_tp:AutoTP.register_replicated_grad_hooks", "norms:replicated_hooks", "norms that see a rank's heads"),
        (f"{LAYERS}:LinearLayer.forward", "linears:column_forward", "AutoTP's column layer"),
        (f"{LAYERS}:LinearAllreduce.forward", "linears:row_forward", "AutoTP's row layer"),
        (f"{LAYERS}:LmHeadLinearAllreduce.forward", "linears:head_forward", "the head of init_inference, a row layer"),
        ("deepspeed.moe.sharded_moe:MOELayer.forward", "moe:moe_forward", "gate, all-to-all, experts and combine are one function"),
        ("deepspeed.inference.engine:InferenceEngine.__init__", "engine:prepare_inference", "init_inference has no other seam"),
    )
    # contextlib's: no_sync is a context manager by its decorator
    return [Patch(target, _late(where), why=why, supported=releases.described("deepspeed"), binds=("contextlib",)) for target, where, why in rows]


def _late(where: str) -> Callable[[Any], Any]:
    """``module:function`` of this package, imported when DeepSpeed is: a process without it does not pay for it."""

    def build(original: Any) -> Any:
        import importlib

        releases.require("torch")
        releases.require("deepspeed")
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(f"{HERE}.{module}"), name)(original)

    return build
