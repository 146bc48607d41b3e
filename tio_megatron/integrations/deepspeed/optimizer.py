"""Adam, the norm of all gradients and clipping by it, in the place of DeepSpeed's: elementwise, and with no order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tio_megatron.integrations.megatron.training.grad_norm import norm_of
from tio_megatron.kernels.squares import scale_
from tio_megatron.layers.optimizer import Adam

NUMBERS = ("lr", "betas", "eps", "weight_decay")
"""Of an optimizer's parameters in the configuration; what else it may hold changes nothing at these values:"""
WITHOUT_EFFECT = {
    "torch_adam": (True, False),
    "foreach": (True, False, None),
    "fp32_optimizer_states": (True, None),
    "bias_correction": (True,),
    "amsgrad": (False,),
}


def basic_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_configure_basic_optimizer``: our Adam for DeepSpeed's, torch's and the fused one; other names are refused."""

    @functools.wraps(original)
    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        if getattr(self, "tio_setting", None) is None:
            return original(self, model_parameters)
        return adam(self.optimizer_name(), dict(self.optimizer_params() or {}), model_parameters)

    return _configure_basic_optimizer


def adam(name: str, given: dict[str, Any], parameters: Any) -> Adam:
    """The optimizer that a configuration asks for.

    Raises:
        ValueError: an option that would change its numbers.
    """
    # Stock: "Adam" means AdamW unless adam_w_mode says otherwise.
    decoupled = bool(given.pop("adam_w_mode", True)) or name.lower() == "adamw"
    numbers = {key: given.pop(key) for key in NUMBERS if key in given}
    for key, value in given.items():
        if key not in WITHOUT_EFFECT or value not in WITHOUT_EFFECT[key]:
            known = f"{WITHOUT_EFFECT[key][0]!r} would work" if key in WITHOUT_EFFECT else f"leave it out; {', '.join(NUMBERS)} and adam_w_mode are known"
            raise ValueError(f"optimizer.params.{key}={value!r} cannot obey the contract: {known}")
    return Adam(parameters, adam_w_mode=decoupled, **numbers)


def sanity_check(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_do_optimizer_sanity_check``: ZeRO-1 and ZeRO-2 in one class, bf16 too; stock gives bf16 ZeRO-1 with fp32 sums another."""

    @functools.wraps(original)
    def _do_optimizer_sanity_check(self: Any, basic: Any) -> Any:
        if getattr(self, "tio_setting", None) is None:
            return original(self, basic)
        return "zero_optimization" if self.zero_optimization() else None

    return _do_optimizer_sanity_check


def zero_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedZeroOptimizer.scaled_global_norm``: every parameter counted once, exactly. A collective over the world."""

    @functools.wraps(original)
    def scaled_global_norm(self: Any, norm_type: int = 2) -> Any:
        if not hasattr(self, "tio_sums"):
            return original(self, norm_type)
        mine = [
            piece
            for group in range(len(self.bit16_groups))
            for piece, parameter in zip(self.averaged_gradients[group], self.params_in_partition[group], strict=False)
            if not parameter.tio_sum.place.copied
        ]
        return torch.tensor(norm_of([(mine, None)]), dtype=torch.float64)

    return scaled_global_norm


def zero_clip(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepSpeedZeroOptimizer.unscale_and_clip_grads``: there is no scale; one product of each element by one fp32 number."""

    @functools.wraps(original)
    def unscale_and_clip_grads(self: Any, grad_groups_flat: Any, total_norm: Any) -> None:
        if not hasattr(self, "tio_sums"):
            original(self, grad_groups_flat, total_norm)
        elif self.clip_grad > 0.0:
            clip(grad_groups_flat, self.clip_grad, float(total_norm))

    return unscale_and_clip_grads


def plain_clip(original: Callable[..., None]) -> Callable[..., None]:
    """``clip_fp32_gradients`` of ZeRO-0, where every rank has all gradients of its experts and shards."""

    @functools.wraps(original)
    def clip_fp32_gradients(self: Any) -> None:
        sums = getattr(self, "tio_sums", None)
        if sums is None:
            original(self)
            return
        kept = [(p.parameter.grad, p.place) for p in sums.parameters if p.parameter.grad is not None]
        norm = norm_of([([grad for grad, place in kept if place.counts], None)])
        clip([grad for grad, _ in kept], self.gradient_clipping(), norm)

    return clip_fp32_gradients


def clip(gradients: Iterable[Tensor], largest: float, norm: float) -> None:
    """Scale ``gradients`` (fp32, contiguous) so that a norm of ``norm`` becomes ``largest``; nothing where it is not above."""
    coefficient = largest / (norm + 1.0e-6)
    if math.isfinite(norm) and coefficient < 1.0:
        for gradient in gradients:
            scale_(gradient.detach(), coefficient)
