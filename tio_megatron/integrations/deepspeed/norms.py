"""RMS norms of a model that DeepSpeed runs: torch's, and those of transformers that are the same function. Each row's term of a weight's gradient is exact.

AutoTP leaves a norm of queries or keys whole and gives it this rank's heads; its gradient is then a sum over ranks. Term by term in integers that sum has
no order, so it is also what one rank finds that has all heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tio_megatron.contract.environment import Setting
from tio_megatron.integrations.deepspeed.state import refuse_run, session
from tio_megatron.layers.norm import rms_norm
from tio_megatron.models.blocks import RMS_NORMS

OVER_TENSOR = "tio_over_tensor"
"""Of a parameter: every rank of tensor parallelism saw other heads with it."""


class OrderedNorm(nn.Module):
    """The contract's RMS norm: ``x`` over the root of its mean square times the weight, and then one rounding."""

    weight: Tensor
    tio_epsilon: float
    tio_setting: Setting

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` -> the same, bf16 or fp32."""
        refuse_run(self.tio_setting)
        return rms_norm(hidden_states, self.weight, self.tio_epsilon)


def epsilon_of(module: nn.Module) -> float | None:
    """What a norm adds to the mean square, if it is one that :class:`OrderedNorm` can stand for."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if isinstance(module, OrderedNorm):
        return module.tio_epsilon
    kind = type(module)
    if kind is nn.RMSNorm:
        return None if module.eps is None else float(module.eps)  # type: ignore[arg-type]
    if kind.__module__.partition(".")[0] == "transformers" and kind.__name__ in RMS_NORMS:
        return float(module.variance_epsilon)  # type: ignore[arg-type]
    return None


def adopt_norm(module: Any, epsilon: float, setting: Setting) -> None:
    """Give a norm our class where it lies; it stays an instance of its own too."""
    if not isinstance(module, OrderedNorm):
        module.__class__ = _ordered(type(module))  # type: ignore[arg-type]
    module.tio_epsilon, module.tio_setting = epsilon, setting


@functools.cache
def _ordered(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Ordered{kind.__name__}", (OrderedNorm, kind), {"__module__": __name__})


def replicated_hooks(original: Callable[..., None]) -> Callable[..., None]:
    """``AutoTP.register_replicated_grad_hooks``: which parameters they are; stock would add rounded gradients over ranks as they come."""

    @functools.wraps(original)
    def register_replicated_grad_hooks(self: Any, model: nn.Module) -> None:
        original(self, model)
        if session() is None:
            return
        for parameter in model.parameters():
            if getattr(parameter, "_ds_grad_allreduce_registered", False) and not hasattr(parameter, OVER_TENSOR):
                hooks: Any = parameter._backward_hooks
                hooks.popitem()
                setattr(parameter, OVER_TENSOR, True)

    return register_replicated_grad_hooks
