"""Our modules under Transformer Engine's parameter names: fused norms, and the ``_extra_state`` that its checkpoints carry.

Each has the parameters of the megatron-core class that it stands in for (``TELayerNormColumnParallelLinear`` and so on), so a checkpoint
of a model built on Transformer Engine loads and is saved unchanged. Needs no Transformer Engine. Adapts names; no arithmetic lives here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from tio_megatron.integrations.megatron.applied import state
from tio_megatron.integrations.megatron.modules.parts import OrderedColumnLinear, OrderedCoreAttention, OrderedRMSNorm, OrderedRowLinear
from tio_megatron.integrations.megatron.resume.extra_state import KeepsExtraState
from tio_megatron.layers.norm import rms_norm


class ColumnLinearForm(KeepsExtraState, OrderedColumnLinear):
    """``TEColumnParallelLinear``."""

    saves_nothing = True


class RowLinearForm(KeepsExtraState, OrderedRowLinear):
    """``TERowParallelLinear``."""

    saves_nothing = True


class NormColumnLinearForm(ColumnLinearForm):
    """``TELayerNormColumnParallelLinear``: RMSNorm (rounded once, as the norm of its own module) and the product after it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        # As OrderedRMSNorm's: partial where this rank sees a part of the tokens.
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[torch.Tensor, None]:
        """``[s, b, h]`` (a slice of ``s`` under sequence parallelism) to ``[s, b, outputs of this rank]``."""
        state.active()
        return super().forward(rms_norm(input_, self.layer_norm_weight, self.eps), weight, runtime_gather_output)


class RMSNormForm(KeepsExtraState, OrderedRMSNorm):
    """``TENorm``, whose norms have an extra state since Transformer Engine 2: distributed checkpoints ask for it by name."""

    saves_nothing = True


class CoreAttentionForm(KeepsExtraState, OrderedCoreAttention):
    """``TEDotProductAttention``."""

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: theirs holds learnable offsets of the softmax there, which are refused, and leaves its extra state out."""
        return {}


class HeldColumnLinear(KeepsExtraState, ColumnParallelLinear):
    """``TEColumnParallelLinear`` of one expert, which only holds its weight."""

    saves_nothing = True


class HeldRowLinear(KeepsExtraState, RowParallelLinear):
    """``TERowParallelLinear`` of one expert, which only holds its weight."""

    saves_nothing = True


FORMS: dict[str, type] = {
    "TEColumnParallelLinear": ColumnLinearForm,
    "TERowParallelLinear": RowLinearForm,
    "TELayerNormColumnParallelLinear": NormColumnLinearForm,
    "TENorm": RMSNormForm,
    "TEDotProductAttention": CoreAttentionForm,
}
"""Ours by the name of megatron-core's class on Transformer Engine. Experts are chosen in :mod:`.moe_spec`; no other name is mapped."""


def named(module: Any) -> str:
    """The name of ``module`` if it is one of megatron-core's classes on Transformer Engine, else an empty string."""
    home = getattr(module, "__module__", None)
    return str(module.__name__) if isinstance(module, type) and home == "megatron.core.extensions.transformer_engine" else ""


def is_mock(module: Any) -> bool:
    """Whether ``module`` is what megatron-core puts in the place of such a class where Transformer Engine is not installed."""
    return type(module).__module__ == "unittest.mock"
