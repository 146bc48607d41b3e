"""The model that a layout is checked for: an HF folder, its ``config.json``, or a name that everybody knows."""

from __future__ import annotations

from pathlib import Path

from tio_megatron.checkpoint import CheckpointConfig
from tio_megatron.contract import ModelShape

KNOWN = {
    "Qwen3-30B-A3B": ModelShape(layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=768),
    "Qwen3-235B-A22B": ModelShape(layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, moe_ffn=1536),
    "Qwen3-0.6B": ModelShape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, vocab=151936, ffn=3072, tied=True),
    "Qwen3-8B": ModelShape(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=151936, ffn=12288),
    "Qwen3-32B": ModelShape(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, vocab=151936, ffn=25600),
}
"""Sizes from the published ``config.json`` of each, for people who plan before they download."""


def shape_of(model: str) -> ModelShape:
    """The sizes of ``model``: a folder, a ``config.json``, or a name of :data:`KNOWN` (with or without ``Qwen/``).

    Raises:
        ValueError: nothing of the kind, or a model that is not covered (:class:`~tio_megatron.checkpoint.CheckpointError`).

    >>> shape_of("Qwen/Qwen3-30B-A3B").experts
    128
    """
    name = model.removeprefix("Qwen/")
    if name in KNOWN:
        return KNOWN[name]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"model {model!r}: no such folder or config.json; known by name are {', '.join(KNOWN)}")
    return CheckpointConfig.from_file(path).shape
