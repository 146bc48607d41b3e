"""The model that a layout is checked for: an HF folder, its ``config.json``, or a name that everybody knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import ModelShape
from tio_megatron.contract.messages import shown
from tio_megatron.contract.strict_json import read_json

KNOWN = {
    "Qwen3-30B-A3B": ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768),
    "Qwen3-235B-A22B": ModelShape(layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=1536),
    "Qwen3-0.6B": ModelShape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, vocab=151936, ffn=3072, tied=True),
    "Qwen3-8B": ModelShape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=151936, ffn=12288),
    "Qwen3-32B": ModelShape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, vocab=151936, ffn=25600),
}
"""Sizes from the published ``config.json`` of each, for people who plan before they download."""

MOST_EXPERTS = 1 << 16

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What vLLM takes from ``generation_config.json`` that changes a distribution."""
_PUBLISHED_SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""Of the same models' ``generation_config.json``."""


@dataclass(frozen=True)
class Model:
    """What of a model decides a number, and how many ``positions`` it has.

    ``sampling``: what its ``generation_config.json`` says, ``said``: what its ``config.json`` does; empty where there is none.
    """

    shape: ModelShape
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    dtype: str = "bfloat16"
    positions: int = 40960
    sampling: dict[str, Any] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict, repr=False)


def model_of(model: str) -> Model:
    """What is known of ``model``: a folder, a ``config.json``, or a name of :data:`KNOWN` (with or without ``Qwen/``).

    Raises:
        ValueError: nothing of the kind, or a model that is not covered (:class:`~tio_megatron.checkpoint.CheckpointError`).
    """
    name = model.removeprefix("Qwen/")
    if name in KNOWN:
        return Model(KNOWN[name], sampling=dict(_PUBLISHED_SAMPLING))
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"model {model!r}: no such folder or config.json; known by name are {', '.join(KNOWN)}")
    config = CheckpointConfig.from_file(path)
    if config.shape.experts > MOST_EXPERTS:
        raise ValueError(f"{path}: num_experts is {shown(config.shape.experts)}; no model has more than {MOST_EXPERTS}")
    sampling = _sampling(path.with_name("generation_config.json"))
    return Model(config.shape, config.rope_theta, config.rms_eps, config.dtype, config.max_positions, sampling, config.raw)


def shape_of(model: str) -> ModelShape:
    """The sizes of ``model``, as :func:`model_of` finds it.

    >>> shape_of("Qwen/Qwen3-30B-A3B").experts
    128
    """
    return model_of(model).shape


def _sampling(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    return {name: found[name] for name in SAMPLING if isinstance(found, dict) and found.get(name) is not None}
