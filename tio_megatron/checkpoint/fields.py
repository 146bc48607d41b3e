"""The type that each field of ``config.json`` must have, in one table. A field that is absent keeps its default; what is not here is not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tio_megatron.findings.messages import shown


def _whole(value: object) -> bool:
    return type(value) is int


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _switch(value: object) -> bool:
    return type(value) is bool


def _text(value: object) -> bool:
    return isinstance(value, str)


def _object(value: object) -> bool:
    return isinstance(value, Mapping)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _wholes(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _token(value: object) -> bool:
    return _whole(value) or _wholes(value)


def _dtype(value: object) -> bool:
    return isinstance(value, str) or type(value).__name__ == "dtype"  # transformers' own objects hold torch's


_WORDS: dict[Callable[[object], bool], str] = {
    _whole: "a whole number",
    _number: "a number",
    _switch: "true or false",
    _text: "text",
    _object: "an object",
    _texts: "a list of names",
    _wholes: "a list of whole numbers",
    _token: "a token id, a list of them",
    _dtype: "text",
}
_KINDS: dict[Callable[[object], bool], tuple[str, ...]] = {
    _whole: ("decoder_sparse_step", "num_local_experts", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    _number: ("initializer_range", "attention_dropout", "hidden_dropout", "router_aux_loss_coef", "partial_rotary_factor"),
    _switch: ("attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings", "norm_topk_prob", "output_router_logits", "use_cache"),
    _text: ("model_type", "hidden_act", "transformers_version"),
}
_OR_NULL: dict[Callable[[object], bool], tuple[str, ...]] = {
    _whole: ("sliding_window", "max_window_layers"),
    _text: ("_name_or_path",),
    _object: ("rope_parameters", "rope_scaling", "quantization_config", "auto_map"),
    _texts: ("layer_types",),
    _wholes: ("mlp_only_layers",),
    _token: ("bos_token_id", "eos_token_id", "pad_token_id"),
    _dtype: ("dtype", "torch_dtype"),
}
"""Fields that writers leave empty: ``null`` is their default."""


def wrong_types(config: Mapping[str, Any]) -> list[str]:
    """A line for each field of another type than it must have.

    Sizes (``hidden_size`` and the like) have their own messages in :func:`tio_megatron.models.shape_from_hf`.

    >>> wrong_types({"norm_topk_prob": None, "model_type": 5, "sliding_window": None, "anything": {}})
    ['norm_topk_prob is None, it must be true or false', 'model_type is 5, it must be text']
    """
    found = []
    for kinds, nullable in ((_KINDS, False), (_OR_NULL, True)):
        for right, names in kinds.items():
            for name in names:
                value = config.get(name)
                if name in config and not right(value) and not (nullable and value is None):
                    found.append(f"{name} is {shown(value)}, it must be {_WORDS[right]}{' or null' if nullable else ''}")
    return found
