"""Sizes of a model that a family's own kernels refuse, known before there is a kernel to ask.

A kernel says so too, but in the first forward, after the weights are loaded. The limits of an NPU's operators are those of
``kernels/npu/limits*.py``; a test asks the kernels themselves on both sides of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tio_megatron.contract.layout import Layout
from tio_megatron.contract.model import ModelShape
from tio_megatron.contract.tree import is_power_of_two


class Problem(NamedTuple):
    """A size that kernels refuse. ``size`` of the layout (tp, ep) could mend it; ``works`` says what would where it cannot."""

    where: str
    what: str
    works: str = ""
    size: str = ""


NPU_HEADS = 256
"""Query heads of one call of attention."""
NPU_RATIO = 64
"""Query heads for each key/value head, over pages."""
NPU_PAGED_HEAD = (128, 192)
"""Head sizes of packed sequences over pages."""
NPU_TRAINED_HEAD = 768
"""Widest head of attention in training."""
NPU_EXPERTS = 128
"""Weights of one grouped product: the experts that one rank holds."""
NPU_INNER = 65536
"""The summed axis of a grouped product stays below this."""


def problems(family: str, layout: Layout, model: ModelShape, *, serving: bool = False) -> Iterator[Problem]:
    """Every size of ``model``, cut by ``layout``, that the kernels of ``family`` refuse.

    Args:
        family: a name of :data:`.families.FAMILIES`; those without limits of their own yield nothing.
        layout: of the side that is built.
        model: sizes.
        serving: that side reads its keys from pages, whose operator has limits of its own.
    """
    if family in _OF:
        yield from _OF[family](layout, model, serving)


def _npu(layout: Layout, model: ModelShape, serving: bool) -> Iterator[Problem]:
    for where, name, width in (("norms", "hidden size", model.hidden), ("query and key norms", "head size", model.head_dim)):
        if not is_power_of_two(width):
            what = f"{name} {width} is no power of two, and an NPU's RMSNorm multiplies by 1 / {width}, which is then rounded"
            yield Problem(where, what, f"a {name} that is a power of two, or family cpu on a CPU, would work")
    if serving and model.head_dim not in NPU_PAGED_HEAD:
        what = f"head size {model.head_dim}; an NPU's operator takes {' or '.join(map(str, NPU_PAGED_HEAD))}"
        yield Problem("attention over pages", what, "head size 128 would work")
    elif model.head_dim > NPU_TRAINED_HEAD:
        what = f"head size {model.head_dim}; an NPU's operator takes at most {NPU_TRAINED_HEAD}"
        yield Problem("attention", what, "head size 128 would work")
    heads, groups = max(model.heads // layout.tp, 1), max(model.kv_heads // layout.tp, 1)
    if heads > NPU_HEADS:
        yield Problem("attention", f"{heads} query heads on a rank; an NPU's operator takes at most {NPU_HEADS}", size="tp")
    if serving and heads // groups > NPU_RATIO:
        what = f"{heads} query heads on a rank for {groups} key/value heads; an NPU's operator takes at most {NPU_RATIO} each"
        yield Problem("attention over pages", what, size="tp")
    if model.experts:
        held = model.experts // layout.ep
        if held > NPU_EXPERTS:
            what, works = f"{held} experts on a rank; an NPU's grouped product takes at most {NPU_EXPERTS}", -(-model.experts // NPU_EXPERTS)
            yield Problem("experts", what, f"ep of at least {works} would work", "ep")
        for where, inner in (("experts.gate_up", model.hidden), ("experts.down", model.moe_ffn // layout.expert_tp)):
            if inner >= NPU_INNER:
                what = f"sums of {inner} terms; an NPU's grouped product takes fewer than {NPU_INNER}"
                yield Problem(where, what, "family cpu on a CPU would work")


_OF: Mapping[str, Callable[[Layout, ModelShape, bool], Iterator[Problem]]] = {"npu-910b": _npu}
