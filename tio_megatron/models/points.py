"""The named points of a forward pass, in the order of computation, with what each is made of.

Rows are tokens; points of experts list a token's experts in ascending id, whatever order an engine keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tio_megatron.findings.messages import shown
from tio_megatron.models import qwen3, qwen3_moe
from tio_megatron.models.blocks import HF_LAYER, POSITIONS, SCALED
from tio_megatron.models.description import Architecture, Block, Operation
from tio_megatron.models.registry import architectures

__all__ = ["SCALED", "Point", "described", "points"]

UNNAMED = {False: qwen3.MODEL, True: qwen3_moe.MODEL}
"""Whose points a layer without and with experts has, where a trace names no architecture: those of a Hugging Face model that is not described, but whose
modules have the same names."""


@dataclass(frozen=True)
class Point:
    """``op`` computes it from ``parents`` (names of points) and ``weights`` (HF names). ``layer`` is None outside the layers."""

    name: str
    op: str
    parents: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    layer: int | None = None

    @property
    def part(self) -> str:
        """The name without its layer."""
        return self.name.rsplit(".", 1)[-1]


def described(architecture: str, moe: bool) -> Architecture:
    """The description of an architecture, or, where it has no name, of layers with or without experts.

    Raises:
        ValueError: a name that is not described.
    """
    if not architecture:
        return UNNAMED[moe]
    if architecture not in architectures():
        raise ValueError(f"architecture is {shown(architecture)}, described are {sorted(architectures())}")
    return architectures()[architecture]


def points(layers: int, moe: Sequence[bool], *, tied: bool = False, architecture: str = "") -> Iterator[Point]:
    """All points in order.

    Args:
        layers: how many there are.
        moe: of each layer, whether it has experts.
        tied: the head is the embedding.
        architecture: whose points they are; see :data:`UNNAMED`.

    Raises:
        ValueError: an architecture that is not described.
    """
    ends = described(architecture, bool(layers and moe[0]))
    stream = ""
    yield _bound(POSITIONS, ends.first, stream, None)
    for operation in ends.first.operations:
        yield _bound(operation, ends.first, stream, None)
        stream = operation.point
    for layer in range(layers):
        before = stream
        for block in described(architecture, moe[layer]).layer(moe[layer]):
            for operation in block.operations:
                point = _bound(operation, block, before, layer)
                yield point
                stream = point.name
    embedding = ends.first.operations[-1].point
    for operation in ends.last.operations:
        block, weight = (ends.first, embedding) if tied and operation.op == "product" else (ends.last, "")
        yield _bound(operation, block, stream, None, weight)


def _bound(operation: Operation, block: Block, stream: str, layer: int | None, weight: str = "") -> Point:
    """``operation`` in its place; ``weight`` is the point whose tensor it takes in place of its own."""
    here, prefix = ("", "") if layer is None else (f"layers.{layer}.", HF_LAYER.format(layer=layer))
    parents = tuple(stream if name == "stream" else name if name == POSITIONS.point else here + name for name in operation.parents)
    tensor = block.tensor(weight or operation.weight or operation.point)
    weights = (prefix + tensor.name.replace("{expert}", "*"),) if tensor else ()
    return Point(here + operation.point, operation.op, parents, weights, layer)
