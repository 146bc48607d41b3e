"""Which products of a model a layout cuts beside leaves, which parts do not divide, and which sizes would work.

A value that is offered was tried with all else that depends on the same size: heads, groups, experts, leaves and the family's limits together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tio_megatron.contract import family_sizes
from tio_megatron.contract.layout import Layout
from tio_megatron.contract.model import ModelShape
from tio_megatron.contract.tree import is_power_of_two

MOST = 64
"""The largest size that is offered."""


@dataclass(frozen=True)
class LayoutProblem:
    """One product whose cut does not fall on leaves."""

    where: str
    what: str
    works: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.works}"


@dataclass(frozen=True)
class _Misfit:
    """What does not fit: ``size`` of the layout is to change, or the leaves on the axis ``cut``, or either. ``works`` is for where neither can."""

    where: str
    what: str
    size: str = ""
    cut: str = ""
    works: str = ""


@dataclass(frozen=True)
class _Axis:
    """An axis of ``length`` terms that ``size`` of the layout cuts into ``parts``, on the leaves ``cut``."""

    cut: str
    length: int
    size: str
    parts: int
    where: str


@dataclass(frozen=True)
class Side:
    """A model under cuts and a kernel family.

    Args:
        cuts: leaves by axis, the fields of :class:`~tio_megatron.contract.Cuts`.
        family: of kernels.
        model: sizes.
        serving: vLLM is the side that is built: it reads keys from pages, and cuts experts by its ``tp`` alone.
    """

    cuts: Mapping[str, int]
    family: str
    model: ModelShape
    serving: bool = False

    def problems(self, layout: Layout) -> Iterator[LayoutProblem]:
        """Every misfit of ``layout``, with what would work."""
        for misfit in self._misfits(layout):
            yield LayoutProblem(misfit.where, misfit.what, self._works(misfit, layout) if misfit.size or misfit.cut else misfit.works)

    def fits(self, layout: Layout) -> bool:
        """Whether ``layout`` has no problem."""
        return not any(self._misfits(layout))

    def sizes(self, size: str, layout: Layout) -> list[int]:
        """The values of ``size`` (tp, etp, ep, pp) with which nothing that depends on it is a problem, once the cuts divide the model."""
        mended = self._mended(layout)
        return [value for value in range(1, MOST + 1) if not mended._blamed(size, self._changed(layout, size, value))]

    def _blamed(self, size: str, layout: Layout) -> bool:
        return any(misfit.size == size for misfit in self._misfits(layout))

    def _changed(self, layout: Layout, size: str, value: int) -> Layout:
        if self.serving and size == "tp":
            return replace(Layout.for_vllm(value, expert_parallel=layout.ep > 1, dp=layout.dp), pp=layout.pp, cp=layout.cp)
        sp = layout.sp and (size != "tp" or value > 1)
        return replace(layout, sp=sp, **{size: value})

    def _axes(self, layout: Layout) -> list[_Axis]:
        m, tp, etp = self.model, layout.tp, layout.expert_tp
        axes = [
            _Axis("attn_row", m.heads * m.head_dim, "tp", tp, "attention.output"),
            _Axis("col_dgrad", (m.heads + 2 * m.kv_heads) * m.head_dim, "tp", tp, "attention.qkv (input gradient)"),
        ]
        if m.experts:
            size = "tp" if self.serving or layout.etp is None else "etp"
            axes.append(_Axis("expert_row", m.moe_ffn, size, etp, "experts.down"))
            axes.append(_Axis("expert_col_dgrad", m.moe_ffn, size, etp, "experts.gate_up (input gradient)"))
        else:
            axes.append(_Axis("mlp_row", m.ffn, "tp", tp, "mlp.down"))
            axes.append(_Axis("col_dgrad", m.ffn, "tp", tp, "mlp.gate_up (input gradient)"))
        return axes

    def _misfits(self, layout: Layout) -> Iterator[_Misfit]:
        m, tp, ep = self.model, layout.tp, layout.ep
        by_ep = "tp" if self.serving else "ep"
        if m.heads % tp:
            yield _Misfit("attention", f"{m.heads} query heads do not divide by tp {tp}", "tp")
        elif m.kv_heads % tp and tp % m.kv_heads:
            yield _Misfit("attention", f"{m.kv_heads} key/value heads and tp {tp}: neither divides the other", "tp")
        if m.experts and m.experts % ep:
            yield _Misfit("experts", f"{m.experts} experts do not divide by ep {ep}", by_ep)
        if not m.experts and ep > 1:
            yield _Misfit("experts", f"ep {ep} on a dense model", by_ep)
        for axis in self._axes(layout):
            leaves = self.cuts[axis.cut]
            if axis.length % leaves:
                yield _Misfit(axis.where, f"{axis.length} terms do not divide into cuts.{axis.cut} = {leaves} equal leaves", "", axis.cut)
            elif leaves % axis.parts:
                yield _Misfit(axis.where, f"cut into {axis.parts} parts, but cuts.{axis.cut} = {leaves} leaves", axis.size, axis.cut)
        if self.cuts["vocab"] % tp:
            yield _Misfit("vocabulary", f"cut into {tp} parts, but cuts.vocab = {self.cuts['vocab']} runs", "tp", "vocab")
        if m.layers % layout.pp:
            yield _Misfit("pipeline", f"{m.layers} layers do not divide by pp {layout.pp}", "pp")
        for limit in family_sizes.problems(self.family, layout, m, serving=self.serving):
            size = by_ep if limit.size == "ep" else limit.size
            yield _Misfit(limit.where, f"family {self.family}: {limit.what}", size, "", limit.works)

    def _mended(self, layout: Layout) -> Side:
        """With the most leaves that divide the model's axes where the cuts do not."""
        cuts = dict(self.cuts)
        for cut, common in self._lengths(layout).items():
            if common % cuts[cut]:
                cuts[cut] = powers_that_divide(common)[-1]
        return replace(self, cuts=cuts)

    def _lengths(self, layout: Layout) -> dict[str, int]:
        """What leaves must divide, by the axis of :class:`Cuts`."""
        axes = self._axes(layout)
        return {axis.cut: math.gcd(*(other.length for other in axes if other.cut == axis.cut)) for axis in axes}

    def _works(self, misfit: _Misfit, layout: Layout) -> str:
        parts = {axis.cut: axis.parts for axis in self._axes(layout)} | {"vocab": layout.tp}
        if misfit.size:
            values = self.sizes(misfit.size, layout)
            if not values and misfit.works:
                return misfit.works
            grown = misfit.cut and self._fits_with_more_leaves(misfit.size, layout)
            return offered(misfit.size, values) + (f", or cuts.{misfit.cut} = {parts[misfit.cut]}" if grown else "")
        size = next(axis.size for axis in self._axes(layout) if axis.cut == misfit.cut)
        powers = powers_that_divide(self._lengths(layout)[misfit.cut])
        if self._fits_with_more_leaves(size, layout):
            return offered(f"cuts.{misfit.cut}", [count for count in powers if count % parts[misfit.cut] == 0])
        return f"cuts.{misfit.cut} = {powers[-1]} with {offered(size, self.sizes(size, layout))}"

    def _fits_with_more_leaves(self, size: str, layout: Layout) -> bool:
        """Whether ``layout`` would fit as far as ``size`` goes, with as many leaves as parts where there are fewer."""
        mended = self._mended(layout)
        parts = {axis.cut: axis.parts for axis in self._axes(layout) if axis.size == size} | ({"vocab": layout.tp} if size == "tp" else {})
        if not all(is_power_of_two(count) for count in parts.values()):
            return False
        grown = replace(mended, cuts={cut: max(leaves, parts.get(cut, 1)) for cut, leaves in mended.cuts.items()})
        return not any(misfit.size == size or not misfit.size and misfit.cut in parts for misfit in grown._misfits(layout))


def offered(name: str, values: list[int]) -> str:
    """``values`` of ``name`` in words."""
    if not values:
        return f"no {name} up to {MOST} would work with the rest as it is"
    return f"{name} {'in ' + str(values) if len(values) > 1 else values[0]} would work"


def powers_that_divide(n: int) -> list[int]:
    """The powers of two up to :data:`MOST` that divide ``n``."""
    return [c for c in (1, 2, 4, 8, 16, 32, 64) if n % c == 0]
