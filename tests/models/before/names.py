"""One table of HF tensor names with the axis a layout may cut.

Shapes: H hidden, D head size, V true vocabulary, I width of an MLP or of one expert.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tio_megatron.contract import ModelShape


class Shard(enum.Enum):
    """How tensor parallelism cuts a tensor."""

    REPLICATED = "replicated"
    COLUMN = "column"
    """The output axis (0) is cut."""
    ROW = "row"
    """The summed axis (1) is cut."""
    VOCAB = "vocab"
    """The vocabulary axis (0) is cut, after padding."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint.

    ``layer`` and ``expert`` are None outside layers and experts. An expert's tensor is cut by expert-tensor parallelism, and belongs
    to one expert-parallel rank; every other tensor is cut by tensor parallelism.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard
    layer: int | None = None
    expert: int | None = None

    @property
    def axis(self) -> int | None:
        """The axis that is cut, or None."""
        return {Shard.REPLICATED: None, Shard.COLUMN: 0, Shard.ROW: 1, Shard.VOCAB: 0}[self.shard]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def tensor_table(shape: ModelShape) -> dict[str, TensorSpec]:
    """Every tensor of a Qwen3 or Qwen3-MoE checkpoint by HF name, in the order of the model.

    >>> shape = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=16, ffn=12)
    >>> for spec in list(tensor_table(shape).values())[:3]:
    ...     print(spec.name, spec.shape, spec.shard.value)
    model.embed_tokens.weight (16, 8) vocab
    model.layers.0.input_layernorm.weight (8,) replicated
    model.layers.0.self_attn.q_proj.weight (8, 8) column
    """
    return {spec.name: spec for spec in _specs(shape)}


def tensor_count(shape: ModelShape) -> int:
    """How many tensors :func:`tensor_table` has, without making it.

    >>> tensor_count(ModelShape(layers=10**9, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=16, ffn=12))
    11000000003
    """
    return shape.layers * (9 + 3 * shape.experts if shape.experts else 11) + (2 if shape.tied else 3)


def _specs(m: ModelShape) -> Iterator[TensorSpec]:
    vocabulary = (m.vocab, m.hidden)
    yield TensorSpec("model.embed_tokens.weight", vocabulary, Shard.VOCAB)
    for layer in range(m.layers):
        yield from _layer(m, layer)
    yield TensorSpec("model.norm.weight", (m.hidden,), Shard.REPLICATED)
    if not m.tied:
        yield TensorSpec("lm_head.weight", vocabulary, Shard.VOCAB)


def _layer(m: ModelShape, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}."
    query, key_value = m.heads * m.head_dim, m.kv_heads * m.head_dim
    rows: list[tuple[str, tuple[int, ...], Shard]] = [
        ("input_layernorm", (m.hidden,), Shard.REPLICATED),
        ("self_attn.q_proj", (query, m.hidden), Shard.COLUMN),
        ("self_attn.k_proj", (key_value, m.hidden), Shard.COLUMN),
        ("self_attn.v_proj", (key_value, m.hidden), Shard.COLUMN),
        ("self_attn.q_norm", (m.head_dim,), Shard.REPLICATED),
        ("self_attn.k_norm", (m.head_dim,), Shard.REPLICATED),
        ("self_attn.o_proj", (m.hidden, query), Shard.ROW),
        ("post_attention_layernorm", (m.hidden,), Shard.REPLICATED),
    ]
    if m.experts:
        rows.append(("mlp.gate", (m.experts, m.hidden), Shard.REPLICATED))
    else:
        rows += _gated_mlp(m.hidden, m.ffn, "mlp.")
    for name, shape, shard in rows:
        yield TensorSpec(f"{prefix}{name}.weight", shape, shard, layer)
    for expert in range(m.experts):
        for name, shape, shard in _gated_mlp(m.hidden, m.moe_ffn, f"mlp.experts.{expert}."):
            yield TensorSpec(f"{prefix}{name}.weight", shape, shard, layer, expert)


def _gated_mlp(hidden: int, width: int, prefix: str) -> list[tuple[str, tuple[int, ...], Shard]]:
    return [
        (f"{prefix}gate_proj", (width, hidden), Shard.COLUMN),
        (f"{prefix}up_proj", (width, hidden), Shard.COLUMN),
        (f"{prefix}down_proj", (hidden, width), Shard.ROW),
    ]
