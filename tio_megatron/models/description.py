"""What a description of a model is made of: tensors of the checkpoint, the parameters that engines make of them, and the points of a forward pass.

Names inside a layer leave out the layer (``self_attn.q_proj.weight``); ``{expert}`` stands for the number of an expert.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tio_megatron.contract import ModelShape

SIZES: Mapping[str, Callable[[ModelShape], int]] = {
    "H": lambda m: m.hidden,
    "D": lambda m: m.head_dim,
    "Q": lambda m: m.heads * m.head_dim,
    "K": lambda m: m.kv_heads * m.head_dim,
    "V": lambda m: m.vocab,
    "I": lambda m: m.ffn,
    "E": lambda m: m.experts,
    "M": lambda m: m.moe_ffn,
}
"""Axes of tensors: hidden H, one head D, all query heads Q, all key or value heads K, true vocabulary V, width of a dense MLP I, experts E, width of one M."""


class Shard(enum.Enum):
    """How tensor parallelism cuts a tensor."""

    REPLICATED = "replicated"
    COLUMN = "column"
    """The output axis (0) is cut."""
    ROW = "row"
    """The summed axis (1) is cut."""
    VOCAB = "vocab"
    """The vocabulary axis (0) is cut, after padding."""


class Packing(enum.Enum):
    """How engines put the tensors of one parameter together."""

    ALONE = "alone"
    """One tensor."""
    STACKED = "stacked"
    """A rank's shard of each tensor below the shard of the one before (gate, then up)."""
    GROUPED = "grouped"
    """Queries, keys and values. Megatron: ``[queries of group 0; key 0; value 0; queries of group 1; ...]``, cut into equal runs of rows. vLLM: a rank's
    shard of each below the one before, a key/value head on several ranks where there are more ranks than such heads."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint: its ``name``, the ``point`` of the forward pass that it makes, and its axes by the letters of :data:`SIZES`."""

    name: str
    point: str
    axes: str
    shard: Shard = Shard.REPLICATED


@dataclass(frozen=True)
class Parameter:
    """Tensors that an engine holds as one.

    Args:
        tensors: in the order of ``packing``, all cut alike.
        megatron: the names that Megatron's layers give it: of the local layers, then of Transformer Engine's where they differ.
        vllm: its name in vLLM.
        packing: how it is put together.
        axis: the field of :class:`tio_megatron.contract.Cuts` on which the product's sum is cut: of the forward pass for tensors cut by rows, of the
            input gradient for tensors cut by columns. Empty where no sum is cut.
        label: the product in words, for the plan's costs.
        transformers: its name in a model of transformers, where that holds it as one too.
        when: which models have it.
    """

    tensors: tuple[Tensor, ...]
    megatron: tuple[str, ...]
    vllm: str
    packing: Packing = Packing.ALONE
    axis: str = ""
    label: str = ""
    transformers: str = ""
    when: Callable[[ModelShape], bool] = field(default=lambda m: True, compare=False, repr=False)

    @property
    def of_experts(self) -> bool:
        """Whether each expert has one."""
        return "{expert}" in self.tensors[0].name

    @property
    def shard(self) -> Shard:
        """How all of its tensors are cut."""
        return self.tensors[0].shard


@dataclass(frozen=True)
class Operation:
    """One point of the forward pass: ``op`` computes it from ``parents``, and from the tensor of the point ``weight`` (by default its own, if there is one).

    A parent is a point of the same layer, ``positions``, or ``stream``: what the layer before gave.
    """

    point: str
    op: str
    parents: tuple[str, ...] = ()
    weight: str = ""


@dataclass(frozen=True)
class Block:
    """A part of a model: its parameters in the order of the checkpoint, its operations in the order of computation.

    Args:
        parameters: those of each expert last.
        operations: the last one is the sum with the residual stream.
        modules: of points without a tensor of their own, the module of transformers and of vLLM that computes them.
        vllm_modules: the same, of modules that vLLM alone has.
    """

    parameters: tuple[Parameter, ...]
    operations: tuple[Operation, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    vllm_modules: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, point: str) -> Tensor | None:
        """The tensor that makes ``point``, if one does."""
        return next((tensor for parameter in self.parameters for tensor in parameter.tensors if tensor.point == point), None)


@dataclass(frozen=True)
class Architecture:
    """One architecture, by the name that ``config.json`` has in ``architectures``.

    Args:
        name: of the architecture.
        model_type: by which transformers and vLLM choose their class.
        vllm: vLLM's class, as ``module:class``.
        sizes: field of :class:`tio_megatron.contract.ModelShape` -> field of ``config.json`` (or several, the first that is there counts).
        first: embedding.
        attention: of every layer.
        last: final norm and head.
        dense: the MLP of layers without experts, None where no layer is one.
        experts: the same of layers with experts.
        megatron: fields of Megatron's ``TransformerConfig`` that no size decides.
        supported: fields of ``config.json`` with the only value that is covered and the one that an absent field has (None: it must be there).
        normalise: the field of ``config.json`` that says whether the chosen experts' probabilities are made to sum to one (absent: they are not).
        publisher: what stands before such a name and a slash.
        published: models that people know by name.
        published_facts: what else their ``config.json`` and ``generation_config.json`` say: ``rope_theta``, ``rms_eps``, ``positions``, ``sampling``.
    """

    name: str
    model_type: str
    vllm: str
    sizes: Mapping[str, str | tuple[str, ...]]
    first: Block
    attention: Block
    last: Block
    dense: Block | None = None
    experts: Block | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)
    supported: tuple[tuple[str, Any, Any], ...] = ()
    normalise: str = ""
    publisher: str = ""
    published: Mapping[str, ModelShape] = field(default_factory=dict)
    published_facts: Mapping[str, Any] = field(default_factory=dict)

    def layer(self, moe: bool) -> tuple[Block, Block]:
        """The blocks of a layer with experts, or without.

        Raises:
            ValueError: the architecture has no such layer.
        """
        second = self.experts if moe else self.dense
        if second is None:
            raise ValueError(f"model: {self.name} has no layer {'with' if moe else 'without'} experts")
        return self.attention, second
