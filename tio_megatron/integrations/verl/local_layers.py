"""mbridge builds models of megatron-core's local layers, and reads and writes their weights.

mbridge (verl's Megatron engine with ``vanilla_mbridge=True``) asks megatron-core for Transformer Engine's layers, always. Two of its methods
decide that: the one that makes the layer spec, and the one that names a parameter's tensors in a Hugging Face folder. Local layers differ in the
names of norms (of their own, not inside the linear that follows) and of experts that are not grouped.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from tio_megatron.integrations import releases
from tio_megatron.integrations.patching import Patch, PatchSet


def enable() -> None:
    """Local layers in models that mbridge builds from now on, whenever it is imported. Harmless when called again.

    Raises:
        ImportError: mbridge is imported already and is another version; if it comes later, its import ends with this error.
    """
    _switch.on()


def disable() -> None:
    """Restore mbridge. Harmless when not enabled."""
    _switch.undo()


def problems() -> list[str]:
    """One line for each patch of mbridge that went in and is not in force any more."""
    return _switch.problems()


def grouped_name(name: str, dense: bool) -> str:
    """A local layer's parameter by the name that Transformer Engine's layer has for it; other names stay.

    Args:
        name: of the parameter, as in ``named_parameters()``.
        dense: whether the layers' MLPs have no experts; their norm lies inside the first linear then.

    >>> grouped_name("decoder.layers.1.input_layernorm.weight", dense=False)
    'decoder.layers.1.self_attention.linear_qkv.layer_norm_weight'
    >>> grouped_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight", dense=False)
    'decoder.layers.1.mlp.experts.linear_fc2.weight3'
    >>> grouped_name("decoder.layers.1.pre_mlp_layernorm.weight", dense=True)
    'decoder.layers.1.mlp.linear_fc1.layer_norm_weight'
    """
    name = re.sub(r"\.input_layernorm\.(weight|bias)$", r".self_attention.linear_qkv.layer_norm_\1", name)
    name = re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r".experts.\2.\g<3>\1", name)
    return re.sub(r"\.pre_mlp_layernorm\.(weight|bias)$", r".mlp.linear_fc1.layer_norm_\1", name) if dense else name


def _local_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """``LLMBridge._get_transformer_layer_spec``: the same layers from the local backend."""
    releases.require("mbridge")  # another may export under other names

    @functools.wraps(original)
    def _get_transformer_layer_spec(self: Any, vp_stage: int | None = None) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)

    return _get_transformer_layer_spec


def _by_local_names(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """``Bridge._weight_name_mapping_mcore_to_hf``: given a local layer's name too."""

    @functools.wraps(original)
    def _weight_name_mapping_mcore_to_hf(self: Any, mcore_weights_name: str) -> list[str]:
        return original(self, grouped_name(mcore_weights_name, dense=not self.config.num_moe_experts))

    return _weight_name_mapping_mcore_to_hf


def _patches() -> list[Patch]:
    supported = releases.described("mbridge")
    return [
        Patch("mbridge.core.llm_bridge:LLMBridge._get_transformer_layer_spec", _local_spec, why="asks for Transformer Engine's layers", supported=supported),
        Patch("mbridge.core.bridge:Bridge._weight_name_mapping_mcore_to_hf", _by_local_names, why="knows Transformer Engine's names", supported=supported),
    ]


_switch = PatchSet(_patches, on_import=True)
