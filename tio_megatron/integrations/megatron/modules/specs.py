"""Our modules in the place of stock ones, in layer specs. Names classes; builds nothing.

``convert`` takes any spec that ``get_gpt_layer_local_spec``, ``get_gpt_layer_with_transformer_engine_spec`` or
``get_gpt_decoder_block_spec`` makes (or a user's own of the same parts) and swaps every part that sums. Parts of Transformer Engine get ours
under its parameter names (:mod:`.te_forms`). Identity parts, stock's bias-dropout-add and the checkpoint's key map stay as they are. A part it does not
know is refused, never left stock.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from tio_megatron.integrations.megatron.modules import parts as modules
from tio_megatron.integrations.megatron.modules import te_forms
from tio_megatron.integrations.megatron.modules.expert_spec import moe_spec
from tio_megatron.integrations.megatron.modules.spec_parts import part_class, part_submodules, unknown, without_params
from tio_megatron.integrations.megatron.versions import release
from tio_megatron.integrations.mindspeed.manager import stock

STOCK_NORMS = ("WrappedTorchNorm", "FusedLayerNorm")


def gpt_layer_spec(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's layers and of the final norm, for users who write ``GPTModel(config, gpt_layer_spec(config), ...)``.

    Args:
        config: ``num_moe_experts`` decides between dense and mixture-of-experts layers, ``qk_layernorm`` whether queries and keys are normalised.
        vp_stage: virtual pipeline stage, as in megatron-core.
        pp_rank: pipeline rank, as in megatron-core.

    Raises:
        ValueError: a part that has no ordered form.
    """
    if config.num_moe_experts and config.moe_layer_freq != 1:
        stage = _stage(vp_stage, pp_rank)
        stock: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **stage)
    else:
        stock = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return convert(stock, config, vp_stage, pp_rank)


def convert(
    spec: ModuleSpec | TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """``spec`` with our parts; what is ours already stays.

    Raises:
        ValueError: names the part that has no ordered form and its place.
    """
    if isinstance(spec, ModuleSpec) and isinstance(spec.module, type) and issubclass(spec.module, TransformerBlock):
        spec = spec.submodules
    if isinstance(spec, ModuleSpec):
        # A bare layer spec leaves the final norm to megatron-core, which takes Transformer Engine's where that is installed.
        spec = TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, **_stage(vp_stage, pp_rank)), layer_norm=_final_norm(spec))
    if not isinstance(spec, TransformerBlockSubmodules):
        raise ValueError(f"layer spec: {type(spec).__name__} is not supported; use get_gpt_layer_local_spec or tio_megatron's gpt_layer_spec")
    converted: dict[int, ModuleSpec] = {}
    for layer in spec.layer_specs:
        if id(layer) not in converted:
            converted[id(layer)] = _layer(layer, config)
    norm = None if spec.layer_norm is None else _part(spec.layer_norm, "final norm")
    return TransformerBlockSubmodules(layer_specs=[converted[id(layer)] for layer in spec.layer_specs], layer_norm=norm)


def _final_norm(layer: ModuleSpec) -> type:
    """Of a model whose layers are ``layer``: under Transformer Engine's names where theirs are."""
    attention = getattr(getattr(layer.submodules, "self_attention", None), "submodules", None)
    first = part_class(getattr(attention, "linear_qkv", None))
    on_te = bool(te_forms.named(first)) or first is te_forms.NormColumnLinearForm
    return te_forms.RMSNormForm if on_te else modules.OrderedRMSNorm


def _stage(vp_stage: int | None, pp_rank: int | None) -> dict[str, int | None]:
    """What this release wants to know to count the layers of a stage."""
    known = {"vp_stage": vp_stage, "pp_rank": pp_rank}
    return {name: known[name] for name in release().stages}


def _layer(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    if spec.module not in (TransformerLayer, modules.OrderedTransformerLayer):
        raise unknown(spec.module, "layer")
    without_params(spec, "layer")
    parts = spec.submodules
    for name in ("cross_attention", "pre_cross_attn_layernorm"):
        if _module(getattr(parts, name)) is not IdentityOp:
            raise unknown(_module(getattr(parts, name)), name)
    for name in ("self_attn_bda", "mlp_bda", "cross_attn_bda"):
        if stock(_module(getattr(parts, name))) not in ADDS:
            raise unknown(_module(getattr(parts, name)), name)
        without_params(getattr(parts, name), name)
    ours = replace(
        parts,
        input_layernorm=_part(parts.input_layernorm, "input_layernorm"),
        pre_mlp_layernorm=_part(parts.pre_mlp_layernorm, "pre_mlp_layernorm"),
        self_attention=_attention(parts.self_attention),
        mlp=_mlp(parts.mlp, config),
    )
    return replace(spec, module=modules.OrderedTransformerLayer, submodules=ours)


def _attention(spec: ModuleSpec) -> ModuleSpec:
    if spec.module is not SelfAttention:
        raise unknown(spec.module, "self_attention")
    masks = {"attn_mask_type": spec.params.get("attn_mask_type")}  # the mask itself is looked at where it arrives
    without_params(spec, "self_attention", masks)
    parts = spec.submodules
    ours = replace(
        parts,
        linear_qkv=_part(parts.linear_qkv, "linear_qkv"),
        core_attention=_part(parts.core_attention, "core_attention"),
        linear_proj=_part(parts.linear_proj, "linear_proj"),
        q_layernorm=_part(parts.q_layernorm, "q_layernorm"),
        k_layernorm=_part(parts.k_layernorm, "k_layernorm"),
    )
    return replace(spec, submodules=ours)


def _mlp(spec: Any, config: TransformerConfig) -> Any:
    module = part_class(spec)
    if isinstance(module, type) and issubclass(module, MoELayer):
        return moe_spec(spec, config)
    if module not in (MLP, modules.OrderedMLP):
        raise unknown(module, "mlp")
    without_params(spec, "mlp")
    parts = part_submodules(spec)
    if parts is None:
        raise ValueError(f"layer spec: {module.__name__} as mlp names no parts; a ModuleSpec with linear_fc1 and linear_fc2 would work")
    ours = replace(parts, linear_fc1=_part(parts.linear_fc1, "linear_fc1"), linear_fc2=_part(parts.linear_fc2, "linear_fc2"))
    if isinstance(spec, functools.partial):
        return functools.partial(modules.OrderedMLP.as_mlp_submodule, **spec.keywords | {"submodules": ours})
    return replace(spec, module=modules.OrderedMLP, submodules=ours)


ORDERED = {
    ColumnParallelLinear: modules.OrderedColumnLinear,
    RowParallelLinear: modules.OrderedRowLinear,
    DotProductAttention: modules.OrderedCoreAttention,
}


ROLES: dict[str, type] = {
    "linear_qkv": modules.OrderedColumnLinear,
    "linear_fc1": modules.OrderedColumnLinear,
    "linear_proj": modules.OrderedRowLinear,
    "linear_fc2": modules.OrderedRowLinear,
    "core_attention": modules.OrderedCoreAttention,
}
"""What a part must be in each place; in all others a norm."""

ADDS = (get_bias_dropout_add, IdentityFuncOp)
"""How a layer adds its input to what it computed: without bias and dropout one exact way of rounding, and none where there is nothing to add."""

OURS = (*ORDERED.values(), modules.OrderedRMSNorm, *te_forms.FORMS.values())


def _part(part: Any, where: str) -> Any:
    """The ordered form of one part (a class, or a spec of one)."""
    module = _module(part)
    if module is None or module is IdentityOp:
        if where in ROLES:
            raise unknown(module, where)
        return part
    without_params(part, where)
    if module in OURS:
        if not issubclass(module, ROLES.get(where, modules.OrderedRMSNorm)):
            raise unknown(module, where)
        return part
    # Under MindSpeed both the part and the names imported above may be its own stand-ins.
    ours = {stock(theirs): ordered for theirs, ordered in ORDERED.items()}.get(stock(module))
    if getattr(stock(module), "__name__", "") in STOCK_NORMS and stock(module).__module__.startswith("megatron.core."):
        ours = modules.OrderedRMSNorm
    ours = te_forms.FORMS.get(te_forms.named(module), ours)
    if ours is None or not issubclass(ours, ROLES.get(where, modules.OrderedRMSNorm)):  # a known part in a place of another kind
        raise unknown(module, where)
    return replace(part, module=ours) if isinstance(part, ModuleSpec) else ours


def _module(part: Any) -> Any:
    return part.module if isinstance(part, ModuleSpec) else part
