"""Our modules in the place of a stock mixture-of-experts layer."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt import moe_module_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts as stock_experts
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from tio_megatron.integrations.megatron.applied.moe_refusals import moe_refusals, refuse_moe
from tio_megatron.integrations.megatron.modules import te_forms
from tio_megatron.integrations.megatron.modules.expert_layer import OrderedMoELayer
from tio_megatron.integrations.megatron.modules.experts import OrderedGroupedMLP, OrderedSequentialMLP
from tio_megatron.integrations.megatron.modules.parts import OrderedColumnLinear, OrderedRowLinear
from tio_megatron.integrations.megatron.modules.router import OrderedRouter
from tio_megatron.integrations.megatron.modules.shared_experts import OrderedSharedExpertMLP
from tio_megatron.integrations.megatron.modules.spec_parts import part_class, part_submodules, require, without_params
from tio_megatron.integrations.megatron.versions import release

__all__ = ["moe_refusals", "moe_spec"]


def moe_spec(stock: Any, config: TransformerConfig) -> Any:
    """Our spec for the layer that ``stock`` (whose module is ``MoELayer``) describes.

    Args:
        stock: as Megatron's ``get_moe_module_spec`` returns it, with the local or the TransformerEngine backend: a ``ModuleSpec``, or from 0.19 on
            a partial call of the class.
        config: the model's config; only checked.

    Raises:
        ValueError: the config has an option that is refused; or names a part that has no ordered form, and its place.
    """
    refuse_moe(config)
    parts = part_submodules(stock)
    _check_parts(stock, parts)
    kind = part_class(parts.experts)
    legacy = (stock_experts.GroupedMLP,) if release().legacy_experts else ()
    if kind in (*legacy, TEGroupedMLP, OrderedGroupedMLP):
        ours = ModuleSpec(module=OrderedGroupedMLP)
    elif kind in (SequentialMLP, OrderedSequentialMLP):
        # The linear modules only hold weights: the experts' forward is one grouped product.
        fc1, fc2 = (te_forms.HeldColumnLinear, te_forms.HeldRowLinear) if _on_te(parts.experts) else (ColumnParallelLinear, RowParallelLinear)
        ours = ModuleSpec(module=OrderedSequentialMLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    else:
        raise ValueError(f"experts: {kind} is not a module we can replace; use Megatron's GroupedMLP, TEGroupedMLP or SequentialMLP")
    on_te = _on_te(parts.shared_experts)
    fc1, fc2 = (te_forms.ColumnLinearForm, te_forms.RowLinearForm) if on_te else (OrderedColumnLinear, OrderedRowLinear)
    shared = ModuleSpec(
        module=OrderedSharedExpertMLP,
        params={"gate": False} if release().gate_in_spec else {},
        submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2),
    )
    router = {"router": OrderedRouter} if release().router_in_spec else {}
    submodules = MoESubmodules(experts=ours, shared_experts=shared, **router)
    if isinstance(stock, functools.partial):
        return functools.partial(OrderedMoELayer, **stock.keywords | {"submodules": submodules})
    return replace(stock, module=OrderedMoELayer, submodules=submodules)


def _check_parts(layer: Any, parts: Any) -> None:
    """Refuse what would be dropped in silence: ours take the place of the whole layer, its router, its experts and their linear layers."""
    require(layer, "mlp", (MoELayer, OrderedMoELayer))
    without_params(layer, "mlp")
    if release().router_in_spec:
        require(parts.router, "router", (TopKRouter, OrderedRouter))
    without_params(parts.experts, "experts")
    experts = part_submodules(parts.experts)
    for where, held in (("experts", experts), ("shared_experts", part_submodules(parts.shared_experts))):
        for name in ("linear_fc1", "linear_fc2"):
            without_params(getattr(held, name, None), f"{where}.{name}")
    if experts is not None and part_class(parts.experts) is TEGroupedMLP:
        require(experts.linear_fc1, "experts.linear_fc1", (), ("TEColumnParallelGroupedLinear",))
        require(experts.linear_fc2, "experts.linear_fc2", (), ("TERowParallelGroupedLinear",))
    elif experts is not None:
        require(experts.linear_fc1, "experts.linear_fc1", (ColumnParallelLinear, te_forms.HeldColumnLinear), ("TEColumnParallelLinear",))
        require(experts.linear_fc2, "experts.linear_fc2", (RowParallelLinear, te_forms.HeldRowLinear), ("TERowParallelLinear",))
    if parts.shared_experts is not None:
        built_by = getattr(moe_module_specs, "_build_shared_experts", SharedExpertMLP)  # a function from 0.19 on
        require(parts.shared_experts, "shared_experts", (SharedExpertMLP, OrderedSharedExpertMLP, built_by))
        without_params(parts.shared_experts, "shared_experts", {"gate": False})
        shared = part_submodules(parts.shared_experts)
        columns = (ColumnParallelLinear, OrderedColumnLinear, te_forms.ColumnLinearForm)
        rows = (RowParallelLinear, OrderedRowLinear, te_forms.RowLinearForm)
        require(shared.linear_fc1, "shared_experts.linear_fc1", columns, ("TEColumnParallelLinear",))
        require(shared.linear_fc2, "shared_experts.linear_fc2", rows, ("TERowParallelLinear",))


def _on_te(spec: Any) -> bool:
    """Whether an MLP's spec names Transformer Engine's linear layers, or ours under their names."""
    first = part_class(getattr(part_submodules(spec), "linear_fc1", None))
    return bool(te_forms.named(first)) or first in (te_forms.ColumnLinearForm, te_forms.HeldColumnLinear)
