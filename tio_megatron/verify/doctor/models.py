"""The model that a layout is checked for: an HF folder, its ``config.json``, or a name that everybody knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import ModelShape
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import shown
from tio_megatron.models import published, published_model

KNOWN = {name: shape for name, (shape, _) in published().items()}
"""Sizes from the published ``config.json`` of each, for people who plan before they download."""

MOST_EXPERTS = 1 << 16

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What vLLM takes from ``generation_config.json`` that changes a distribution."""


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
    """What is known of ``model``: a folder, a ``config.json``, or a published name (with or without the publisher's).

    Raises:
        ValueError: nothing of the kind, or a model that is not covered (:class:`~tio_megatron.checkpoint.CheckpointError`).
    """
    if (found := published_model(model)) is not None:
        shape, facts = found
        return Model(shape, **facts)
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
