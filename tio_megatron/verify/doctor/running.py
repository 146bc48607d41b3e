"""A configuration as it will run: what was written, and the defaults of everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tio_megatron.contract.strict_json import read_json
from tio_megatron.verify.doctor import defaults

Kind = Literal["words", "megatron-lm", "transformer-config", "verl", "vllm"]
"""Who reads the configuration. ``words`` say a layout and nothing else."""

RELEASE: dict[Kind, str] = {
    "words": "",
    "megatron-lm": defaults.MEGATRON_LM,
    "transformer-config": defaults.MEGATRON_CORE,
    "verl": defaults.VERL,
    "vllm": defaults.VLLM,
}


@dataclass(frozen=True)
class Running(Mapping[str, Any]):
    """Every setting that is known, by name; ``written`` are the names that somebody wrote, ``left`` those whose value is a variable that is not known here
    (they are held with their defaults, so that the other settings can be looked at)."""

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
        return "" if name in self.written else f" ({RELEASE[self.kind]}'s default)" if RELEASE[self.kind] else ""


def trainer(kind: Kind, settings: Mapping[str, Any], left: Mapping[str, str] = MappingProxyType({})) -> Running:
    """The trainer's settings under megatron-core's names; ``left``: :attr:`Running.left`.

    >>> run = trainer("megatron-lm", {"swiglu": True, "bf16": True})
    >>> run["hidden_dropout"], run.origin("hidden_dropout"), run["gated_linear_unit"]
    (0.1, " (Megatron-LM core_v0.16.1's default)", True)
    """
    if kind == "words":
        return Running(kind)
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "disable_bias_linear":
            name, value = "add_bias_linear", not value
        named[defaults.MEGATRON_NAMES.get(name, name)] = value
    written = frozenset(named)
    left = {defaults.MEGATRON_NAMES.get(name, name): value for name, value in left.items()}
    if kind == "megatron-lm":
        held = megatron_lm({**defaults.MEGATRON_ARGUMENTS, **named}, written)
        taken = defaults.FROM_CHECKPOINT if named.get("use_checkpoint_args") else frozenset()
        return Running(kind, {name: value for name, value in held.items() if name not in taken}, (written | _implied(written)) - taken, left)
    if kind == "verl":
        return Running(kind, {**defaults.VERL_TRAINER, **named}, written, left)
    return Running(kind, _query_groups({**defaults.TRANSFORMER_CONFIG, **named}), written, left)


def megatron_lm(values: dict[str, Any], written: frozenset[str]) -> dict[str, Any]:
    """What Megatron-LM's ``validate_args`` and ``core_transformer_config_from_args`` make of its arguments, as far as it decides a number."""
    if values["use_rotary_position_embeddings"]:
        values["position_embedding_type"] = "rope"
    values["gated_linear_unit"] = bool(values["swiglu"] or values["quick_geglu"])
    if values["bf16"] and not values.get("grad_reduce_in_bf16"):
        values["grad_reduce_in_fp32"] = True
    if not values["group_query_attention"]:
        values["num_query_groups"] = None
    _query_groups(values)
    hidden = values.get("hidden_size")
    if values["ffn_hidden_size"] is None and isinstance(hidden, int):
        values["ffn_hidden_size"] = int((4 * hidden * 2 / 3) / 64) * 64 if values["swiglu"] else 4 * hidden
    if values["num_moe_experts"] is not None and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    return values


def _implied(written: frozenset[str]) -> frozenset[str]:
    """Names that other names decide: they count as written."""
    implied = set()
    if "use_rotary_position_embeddings" in written:
        implied.add("position_embedding_type")
    if "swiglu" in written:
        implied.add("gated_linear_unit")
    if "bf16" in written:
        implied.add("grad_reduce_in_fp32")
    return frozenset(implied)


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
    settings = _with_generation_config(settings)
    written = frozenset(settings)
    if kind == "verl":
        return Running(kind, {**defaults.VLLM_ENGINE, **defaults.VLLM_DECIDES, **defaults.VERL_ROLLOUT, **settings}, written, left)
    values = {**defaults.VLLM_ENGINE, **settings}
    values |= {name: decided for name, decided in defaults.VLLM_DECIDES.items() if values[name] is None}
    return Running(kind, values, written, left)


def _with_generation_config(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM lays ``override_generation_config`` over the model's ``generation_config.json``: it is what a request without a temperature gets."""
    over = tree_of(settings.get("override_generation_config"))
    dotted = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith("override_generation_config.")}
    return {**{name: value for name, value in {**(over or {}), **dotted}.items() if name in SAMPLING_NAMES}, **settings}


def tree_of(value: Any) -> dict[str, Any] | None:
    """A mapping, or the text of one as a command line gives it; None for anything else."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError):
            return None
    return dict(value) if isinstance(value, Mapping) else None


SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def dtype(run: Running) -> str | None:
    """The element type the trainer computes in; None when the layout was given in words."""
    if run.kind == "words":
        return None
    if run.kind == "verl":
        return str(run["dtype"])
    return "bfloat16" if run.get("bf16") else "float16" if run.get("fp16") else "float32"
