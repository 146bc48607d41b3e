"""Our modules in the place of a stock mixture-of-experts layer."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.integrations.megatron.modules import OrderedColumnLinear, OrderedRowLinear
from tio_megatron.integrations.megatron.moe_experts import OrderedGroupedMLP, OrderedSequentialMLP
from tio_megatron.integrations.megatron.moe_layer import OrderedMoELayer
from tio_megatron.integrations.megatron.moe_refusals import moe_refusals, refuse_moe
from tio_megatron.integrations.megatron.moe_router import OrderedRouter
from tio_megatron.integrations.megatron.moe_shared import OrderedSharedExpertMLP

__all__ = ["moe_refusals", "moe_spec"]


def moe_spec(stock: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Our spec for the layer that ``stock`` (whose module is ``MoELayer``) describes.

    Args:
        stock: as Megatron's ``get_moe_module_spec`` returns it, with the local or the TransformerEngine backend.
        config: the model's config; only checked.

    Raises:
        ValueError: the config has an option that is refused, or the experts are of an unknown kind.
    """
    refuse_moe(config)
    submodules = stock.submodules
    experts = submodules.experts
    kind = experts.module if isinstance(experts, ModuleSpec) else experts
    if kind in (GroupedMLP, TEGroupedMLP, OrderedGroupedMLP):
        ours = ModuleSpec(module=OrderedGroupedMLP)
    elif kind in (SequentialMLP, OrderedSequentialMLP):
        # The linear modules only hold weights: the experts' forward is one grouped product.
        ours = ModuleSpec(module=OrderedSequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    else:
        raise ValueError(f"experts: {kind} is not a module we can replace; use Megatron's GroupedMLP, TEGroupedMLP or SequentialMLP")
    shared = ModuleSpec(module=OrderedSharedExpertMLP, submodules=MLPSubmodules(linear_fc1=OrderedColumnLinear, linear_fc2=OrderedRowLinear))
    return ModuleSpec(
        module=OrderedMoELayer,
        submodules=MoESubmodules(experts=ours, shared_experts=shared, router=OrderedRouter),
        metainfo=dict(stock.metainfo),
    )
