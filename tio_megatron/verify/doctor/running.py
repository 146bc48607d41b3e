"""A configuration as it will run: what was written, and the defaults of everything else (:mod:`tio_megatron.integrations.option_facts`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tio_megatron.files.strict_json import read_json
from tio_megatron.integrations.option_facts import RELEASE, options

Kind = Literal["words", "megatron-lm", "megatron-core", "verl", "vllm"]
"""Who reads the configuration. ``words`` say a layout and nothing else."""

CORE_NAMES = {
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
}
"""Megatron-LM's arguments whose name is not that of the field of megatron-core's configurations that they set."""

VERL_MAKES: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_grouped_gemm": True,
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "apply_rope_fusion": False,
    "calculate_per_token_loss": False,
    "optimizer": "adam",
    "grad_reduce_in_fp32": True,
}
"""What verl makes of an HF model for a ``TransformerConfig``, beside its YAML. Sizes, epsilon and rotary base are the model's."""

VLLM_DECIDES: dict[str, Any] = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "disable_cascade_attn": True}
"""What vLLM makes of None for a decoder that generates."""

SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Running(Mapping[str, Any]):
    """Every setting that is known, by name; ``written`` are the names that somebody wrote, ``left`` those whose value is a variable that is not known here
    (they are not held)."""

    kind: Kind
    held: Mapping[str, Any] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    left: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def origin(self, name: str) -> str:
        """For messages: empty for what was written, else whose default it is."""
        return "" if name in self.written or self.kind == "words" else f"{RELEASE[self.kind]}'s default"

    @classmethod
    def of(cls, kind: Kind, held: Mapping[str, Any], written: frozenset[str], left: Mapping[str, str]) -> Running:
        """Without what ``left`` names."""
        return cls(kind, {name: value for name, value in held.items() if name not in left}, written - set(left), left)


def trainer(kind: Kind, settings: Mapping[str, Any], left: Mapping[str, str] = MappingProxyType({})) -> Running:
    """The trainer's settings under megatron-core's names; ``left``: :attr:`Running.left`.

    >>> run = trainer("megatron-lm", {"swiglu": True, "bf16": True})
    >>> run["hidden_dropout"], run.origin("hidden_dropout"), run["gated_linear_unit"]
    (0.1, "Megatron-LM core_v0.16.1's default", True)
    """
    if kind == "words":
        return Running(kind)
    named = {CORE_NAMES.get(name, name): value for name, value in settings.items()}
    left = {CORE_NAMES.get(name, name): value for name, value in left.items()}
    written = frozenset(named)
    if kind == "verl":
        return Running.of(kind, {**options("verl").defaults["trainer"], **VERL_MAKES, **named}, written, left)
    if kind == "megatron-core":
        return Running.of(kind, _query_groups({**options(kind).defaults, **named}), written, left)
    known = options("megatron-lm")
    held = megatron_lm({**{CORE_NAMES.get(name, name): value for name, value in known.defaults.items()}, **named}, written)
    if named.get("use_checkpoint_args"):
        taken = {CORE_NAMES.get(name, name) for name in known.from_checkpoint} | (known.where_unset - written)
        taken |= {"gated_linear_unit"} if "swiglu" in taken else set()
        held, written = {name: value for name, value in held.items() if name not in taken}, written - taken
    return Running.of(kind, held, written | _implied(written), left)


def megatron_lm(values: dict[str, Any], written: frozenset[str]) -> dict[str, Any]:
    """What Megatron-LM's ``validate_args`` and ``core_transformer_config_from_args`` make of its arguments, as far as it decides a number."""
    if values["use_rotary_position_embeddings"]:
        values["position_embedding_type"] = "rope"
    values["gated_linear_unit"] = bool(values["swiglu"] or values["quick_geglu"])
    if values["bf16"] and not values["grad_reduce_in_bf16"]:
        values["grad_reduce_in_fp32"] = True
    if not values["group_query_attention"]:
        values["num_query_groups"] = None
    _query_groups(values)
    hidden = values["hidden_size"]
    if values["ffn_hidden_size"] is None and isinstance(hidden, int):
        values["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if values["swiglu"] else 4 * hidden
    if values["num_moe_experts"] is not None and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    return values


def _implied(written: frozenset[str]) -> frozenset[str]:
    """Names that other names decide: they count as written."""
    decides = {"use_rotary_position_embeddings": "position_embedding_type", "swiglu": "gated_linear_unit", "bf16": "grad_reduce_in_fp32"}
    return frozenset(name for by, name in decides.items() if by in written)


def _query_groups(values: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if values["num_query_groups"] is None:
        values["num_query_groups"] = heads
    if values["kv_channels"] is None and isinstance(heads, int) and isinstance(hidden, int) and heads:
        values["kv_channels"] = hidden // heads
    return values


def rollout(kind: Kind, settings: Mapping[str, Any], left: Mapping[str, str] = MappingProxyType({})) -> Running:
    """The rollout's settings under vLLM's names; ``left``: :attr:`Running.left`."""
    if kind == "words":
        return Running(kind)
    settings = {**_over_generation_config(settings), **settings}
    verls = options("verl").defaults["rollout"] if kind == "verl" else {}
    values = {**options("vllm").defaults, **verls, **settings}
    values |= {name: decided for name, decided in VLLM_DECIDES.items() if values[name] is None}
    return Running.of(kind, values, frozenset(settings), left)


def _over_generation_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM lays ``override_generation_config`` over the model's ``generation_config.json``: it is what a request without a temperature gets."""
    return {name: value for name, value in mapping_of(settings, "override_generation_config").items() if name in SAMPLING_NAMES}


def mapping_of(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What an option that is a mapping says: in one piece, and behind a point (``name.key``)."""
    dotted = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name}.")}
    return {**(tree_of(settings.get(name)) or {}), **dotted}


def tree_of(value: Any) -> dict[str, Any] | None:
    """A mapping, or the text of one as a command line gives it; None for anything else."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return None
    return dict(value) if isinstance(value, Mapping) else None


def dtype(run: Running) -> str | None:
    """The element type the trainer computes in; None when nothing says it."""
    if run.kind == "words" or {"bf16", "fp16", "dtype"} & set(run.left):
        return None
    if run.kind == "verl":
        return str(run["dtype"])
    return "bfloat16" if run.get("bf16") else "float16" if run.get("fp16") else "float32"
