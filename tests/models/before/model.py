"""The sizes of a model that decide where its sums can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tio_megatron.contract.messages import shown

MAX_POSITIONS = 1 << 20
"""Positions of the longest sequence: up to here the tables of rotary angles are exact (:mod:`tio_megatron.kernels.rope.table`)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3 or Qwen3-MoE model. ``experts`` is 0 for a dense one.

    ``hidden`` H, ``heads`` query heads, ``kv_heads`` key/value heads, ``head_dim`` D, ``ffn`` width of a dense MLP, ``moe_ffn`` width of
    one expert, ``vocab`` true vocabulary (no padding).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} must be at least 1, got {shown(getattr(self, name))}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model: {self.heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"model: top_k {self.top_k} must be between 1 and the number of experts {self.experts}")
        if self.experts and self.moe_ffn < 1:
            raise ValueError("model: a mixture of experts needs moe_ffn")
        if not self.experts and self.ffn < 1:
            raise ValueError("model: a dense model needs ffn")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the contents of an HF ``config.json`` of Qwen3MoeForCausalLM or Qwen3ForCausalLM.

        Raises:
            ValueError: a field is missing, or the architecture is another one.
        """
        architectures = config.get("architectures") or []
        known = {"Qwen3MoeForCausalLM": True, "Qwen3ForCausalLM": False}
        if not isinstance(architectures, list | tuple) or list(architectures) not in [[name] for name in known]:
            raise ValueError(f"config.json: architectures is {shown(architectures)}, supported are {sorted([name] for name in known)}")
        moe = known[architectures[0]]
        experts_key = "num_local_experts" if "num_local_experts" in config and "num_experts" not in config else "num_experts"
        keys = {
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "vocab": "vocab_size",
            **({"experts": experts_key, "top_k": "num_experts_per_tok", "moe_ffn": "moe_intermediate_size"} if moe else {"ffn": "intermediate_size"}),
        }
        missing = [key for key in keys.values() if config.get(key) is None]
        if missing:
            raise ValueError(f"config.json: missing {', '.join(missing)}")
        wrong = [key for key in keys.values() if type(config[key]) is not int]
        if wrong:
            raise ValueError(f"config.json: not whole numbers: {', '.join(f'{key} = {shown(config[key])}' for key in wrong)}")
        return cls(**{field: config[key] for field, key in keys.items()}, tied=bool(config.get("tie_word_embeddings", False)))
