"""Tables of one model, derived from its description: every tensor of the checkpoint, every parameter of the engines, and which of them is which."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tio_megatron.contract import ModelShape
from tio_megatron.models.blocks import HF_LAYER
from tio_megatron.models.description import SIZES, Block, Parameter, Shard
from tio_megatron.models.registry import architecture_of, architectures, moe_layers


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
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """A parameter in its place in a model: ``specs`` are its tensors, ``vllm`` is its name in vLLM (where all experts of a layer share it)."""

    parameter: Parameter
    specs: tuple[TensorSpec, ...]
    vllm: str


def parameters(shape: ModelShape) -> Iterator[Placed]:
    """Every parameter of a model, in the order of its checkpoint.

    Raises:
        ValueError: ``shape`` names no architecture that is described.
    """
    described = architecture_of(shape)
    yield from _of_block(described.first, shape, None)
    for layer, moe in enumerate(moe_layers(shape)):
        for block in described.layer(moe):
            yield from _of_block(block, shape, layer)
    yield from _of_block(described.last, shape, None)


def tensor_table(shape: ModelShape) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint by HF name, in the order of the model.

    Raises:
        ValueError: ``shape`` names no architecture that is described.

    >>> shape = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=16, ffn=12, architecture="Qwen3ForCausalLM")
    >>> for spec in list(tensor_table(shape).values())[:3]:
    ...     print(spec.name, spec.shape, spec.shard.value)
    model.embed_tokens.weight (16, 8) vocab
    model.layers.0.input_layernorm.weight (8,) replicated
    model.layers.0.self_attn.q_proj.weight (8, 8) column
    """
    return {spec.name: spec for placed in parameters(shape) for spec in placed.specs}


def tensor_count(shape: ModelShape) -> int:
    """How many tensors :func:`tensor_table` has, without making it.

    >>> tensor_count(ModelShape(layers=10**9, hidden=8, heads=2, kv_heads=1, head_dim=4, vocab=16, ffn=12, architecture="Qwen3ForCausalLM"))
    11000000003
    """
    described = architecture_of(shape)

    def count(*blocks: Block) -> int:
        held = [parameter for block in blocks for parameter in block.parameters if parameter.when(shape)]
        return sum(len(parameter.tensors) * (shape.experts if parameter.of_experts else 1) for parameter in held)

    return count(described.first, described.last) + shape.layers * count(*described.layer(bool(shape.experts)))


def tied_tensors(shape: ModelShape) -> dict[str, str]:
    """Tensors that a model whose head is its embedding may store all the same -> those whose bytes they must have."""
    described = architecture_of(shape)
    first, last = ([t for each in block.parameters if each.shard is Shard.VOCAB for t in each.tensors] for block in (described.first, described.last))
    return {head.name: embedding.name for head, embedding in zip(last, first, strict=True)} if shape.tied else {}


@cache
def vocabulary_parameters() -> frozenset[str]:
    """Names of Megatron's parameters whose rows are the vocabulary, padded."""
    blocks = [block for described in architectures().values() for block in (described.first, described.last)]
    return frozenset(name for block in blocks for each in block.parameters if each.shard is Shard.VOCAB for name in each.megatron)


def megatron_tensors(shape: ModelShape, name: str, layer: int | None, expert: int) -> Placed | None:
    """What a parameter of a Megatron model holds; None where no description knows it.

    Args:
        shape: of the model.
        name: of the parameter, in its layer (``mlp.router.weight``) or outside all layers.
        layer: its number in the whole model; None outside layers.
        expert: the first expert of this rank; ``name`` counts from there.
    """
    described = architecture_of(shape)
    if layer is None:
        held = [*_of_block(described.first, shape, None), *_of_block(described.last, shape, None)]
        found = next((placed for placed in held if name in placed.parameter.megatron), None)
        if found is None and shape.tied and name in vocabulary_parameters():  # the last stage's copy of the embedding
            found = next(placed for placed in held if placed.parameter.shard is Shard.VOCAB)
        return found
    for pattern, parameter in _patterns(described.name, moe_layers(shape)[layer]):
        if matched := pattern.fullmatch(name):
            return _place(parameter, shape, layer, expert + int(matched[1]) if parameter.of_experts else None)
    return None


@cache
def _patterns(architecture: str, moe: bool) -> list[tuple[re.Pattern[str], Parameter]]:
    held = [(name, each) for block in architectures()[architecture].layer(moe) for each in block.parameters for name in each.megatron]
    return [(re.compile(re.escape(name).replace(re.escape("{expert}"), r"(\d+)")), each) for name, each in held]


def _of_block(block: Block, shape: ModelShape, layer: int | None) -> Iterator[Placed]:
    held = [parameter for parameter in block.parameters if parameter.when(shape)]
    for parameter in held:
        if not parameter.of_experts:
            yield _place(parameter, shape, layer, None)
    for expert in range(shape.experts):
        for parameter in held:
            if parameter.of_experts:
                yield _place(parameter, shape, layer, expert)


def _place(parameter: Parameter, shape: ModelShape, layer: int | None, expert: int | None) -> Placed:
    prefix = "" if layer is None else HF_LAYER.format(layer=layer)
    specs = tuple(
        TensorSpec(f"{prefix}{tensor.name.format(expert=expert)}", tuple(SIZES[axis](shape) for axis in tensor.axes), tensor.shard, layer, expert)
        for tensor in parameter.tensors
    )
    return Placed(parameter, specs, prefix + parameter.vllm)
