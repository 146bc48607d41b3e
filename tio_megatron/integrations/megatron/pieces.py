"""Which elements of which HF tensor each parameter of a Megatron model holds, in any layout.

Megatron fuses what HF keeps apart: queries, keys and values interleaved by group, gate and up per shard. :func:`pieces` is the one
description of it; loading and exporting both read it.

Shapes: H hidden, D head size, G key/value groups, Q query heads, V true vocabulary, I width of an MLP or of one expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from tio_megatron.checkpoint import TensorSpec, tensor_table
from tio_megatron.contract import ModelShape


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` along ``axis`` of the HF tensor ``name``; ``view`` is this rank's memory of them."""

    name: str
    axis: int
    start: int
    stop: int
    view: torch.Tensor


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the groups that cut weights."""

    tp: int
    tp_rank: int
    etp: int
    etp_rank: int
    ep: int
    ep_rank: int

    @classmethod
    def current(cls) -> Place:
        """From Megatron's parallel state."""
        return cls(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module).

    Raises:
        ValueError: a list of model chunks.
    """
    if isinstance(model, list | tuple):
        raise ValueError(
            f"the model is a list with {len(model)} model chunks: virtual pipeline stages are not supported here; a single chunk on each rank, without its "
            "list, would work"
        )
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def pieces(model: torch.nn.Module, shape: ModelShape, place: Place | None = None, values: Mapping[str, torch.Tensor] | None = None) -> Iterator[Piece]:
    """What this rank's parameters hold, parameter by parameter, or the tensors of ``values`` in their places. Vocabulary padding is in no piece.

    Raises:
        ValueError: a parameter has no HF counterpart, or another size than this layout gives it.
    """
    model, place = unwrap(model), place or Place.current()
    table = tensor_table(shape)
    for parameter, weight in model.named_parameters():
        yield from pieces_of(parameter, weight if values is None else values[parameter], model, shape, table, place)


def tensor_names(model: torch.nn.Module, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, tuple[str, ...]]]:
    """Each parameter of this rank with the HF tensors it belongs to, a vocabulary shard that is all padding included."""
    model, place, table = unwrap(model), Place.current(), tensor_table(shape)
    for name, parameter in model.named_parameters():
        if name in VOCABULARY:
            yield parameter, (_vocabulary_tensor(name, shape),)
        else:
            yield parameter, tuple(piece.name for piece in pieces_of(name, parameter, model, shape, table, place))


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")
_ALIKE = {
    "input_layernorm.weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
    "self_attention.linear_proj.weight": "self_attn.o_proj",
    "mlp.router.weight": "mlp.gate",
    "mlp.linear_fc2.weight": "mlp.down_proj",
}
"""Parameters of a layer that are one HF tensor, cut as the table says."""


def pieces_of(name: str, weight: torch.Tensor, model: torch.nn.Module, shape: ModelShape, table: dict[str, TensorSpec], place: Place) -> Iterator[Piece]:
    """What ``weight``, in the place of the parameter ``name``, holds; see :func:`pieces`."""
    if name in VOCABULARY:
        yield from _vocabulary_rows(table[_vocabulary_tensor(name, shape)], weight, place, name)
        return
    if name == "decoder.final_layernorm.weight":
        yield _cut(table["model.norm.weight"], weight, 1, 0, name)
        return
    matched = _LAYER.fullmatch(name)
    if matched is None:
        raise ValueError(f"{name}: no HF tensor is known for this parameter")
    layer = model.decoder.layers[int(matched[1])].layer_number - 1  # the stage's own numbering starts anew on every pipeline rank
    prefix, rest = f"model.layers.{layer}.", matched[2]
    if rest in _ALIKE:
        yield _cut(table[f"{prefix}{_ALIKE[rest]}.weight"], weight, place.tp, place.tp_rank, name)
    elif rest == "self_attention.linear_qkv.weight":
        yield from _qkv(weight, shape, prefix, place, name)
    elif rest == "mlp.linear_fc1.weight":
        yield from _gate_up(weight, table, f"{prefix}mlp.", place.tp, place.tp_rank, name)
    elif expert := _EXPERT.fullmatch(rest):
        local, fc = int(expert[1] or expert[4]), expert[2] or expert[3]
        number = place.ep_rank * (shape.experts // place.ep) + local
        where = f"{prefix}mlp.experts.{number}."
        if fc == "1":
            yield from _gate_up(weight, table, where, place.etp, place.etp_rank, name)
        else:
            yield _cut(table[f"{where}down_proj.weight"], weight, place.etp, place.etp_rank, name)
    else:
        raise ValueError(f"{name}: no HF tensor is known for this parameter")


def _vocabulary_tensor(name: str, shape: ModelShape) -> str:
    return "model.embed_tokens.weight" if name == VOCABULARY[0] or shape.tied else "lm_head.weight"


def _cut(spec: TensorSpec, view: torch.Tensor, parts: int, index: int, name: str) -> Piece:
    """The ``index``-th of ``parts`` equal shards along the table's axis (all of it when the tensor is replicated)."""
    axis = spec.axis if spec.axis is not None else 0
    parts, index = (parts, index) if spec.axis is not None else (1, 0)
    expected = list(spec.shape)
    expected[axis] //= parts
    if spec.shape[axis] % parts or list(view.shape) != expected:
        raise ValueError(f"{name} is {list(view.shape)}, shard {index} of {parts} of {spec.name} {list(spec.shape)} was expected")
    return Piece(spec.name, axis, index * expected[axis], (index + 1) * expected[axis], view)


def _vocabulary_rows(spec: TensorSpec, weight: torch.Tensor, place: Place, name: str) -> Iterator[Piece]:
    rows, true_rows = weight.shape[0], spec.shape[0]
    if rows * place.tp < true_rows or weight.shape[1:] != spec.shape[1:]:
        raise ValueError(f"{name} is {list(weight.shape)} on each of {place.tp} ranks, {spec.name} is {list(spec.shape)}")
    start = place.tp_rank * rows
    stop = min(true_rows, start + rows)
    if start < stop:
        yield Piece(spec.name, 0, start, stop, weight[: stop - start])


def _gate_up(weight: torch.Tensor, table: dict[str, TensorSpec], where: str, parts: int, index: int, name: str) -> Iterator[Piece]:
    """Megatron keeps ``[gate shard; up shard]`` in one parameter."""
    half = weight.shape[0] // 2
    yield _cut(table[f"{where}gate_proj.weight"], weight[:half], parts, index, name)
    yield _cut(table[f"{where}up_proj.weight"], weight[half:], parts, index, name)


def _qkv(weight: torch.Tensor, shape: ModelShape, prefix: str, place: Place, name: str) -> Iterator[Piece]:
    """Megatron interleaves by group: ``[queries of group 0; key 0; value 0; queries of group 1; ...]``, cut into equal runs of rows.

    With more ranks than groups a run ends inside a group, so runs and groups are intersected row by row range.
    """
    queries = shape.heads // shape.kv_heads * shape.head_dim
    total = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if weight.shape != (total // place.tp, shape.hidden) or total % place.tp:
        raise ValueError(f"{name} is {list(weight.shape)}, shard {place.tp_rank} of {place.tp} of {total} rows by {shape.hidden} was expected")
    lo = place.tp_rank * weight.shape[0]
    at = 0
    for group in range(shape.kv_heads):
        for projection, rows in (("q", queries), ("k", shape.head_dim), ("v", shape.head_dim)):
            start, stop = max(at, lo), min(at + rows, lo + weight.shape[0])
            if start < stop:
                source = group * rows + start - at
                yield Piece(f"{prefix}self_attn.{projection}_proj.weight", 0, source, source + stop - start, weight[start - lo : stop - lo])
            at += rows
