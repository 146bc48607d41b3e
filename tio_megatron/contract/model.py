"""The sizes of a model that decide where its sums can be cut."""

from __future__ import annotations

from dataclasses import dataclass

from tio_megatron.findings.messages import shown

MAX_POSITIONS = 1 << 20
"""Positions of the longest sequence: up to here the tables of rotary angles are exact (:mod:`tio_megatron.kernels.rope.table`)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. ``experts`` is 0 for a dense one.

    ``hidden`` H, ``heads`` query heads, ``kv_heads`` key/value heads, ``head_dim`` D, ``ffn`` width of a dense MLP, ``moe_ffn`` width of
    one expert, ``vocab`` true vocabulary (no padding). ``architecture`` names the description of :mod:`tio_megatron.models` that has its tensors; it is
    empty where sizes alone are known, and they are all that a contract looks at.
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
    architecture: str = ""

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
