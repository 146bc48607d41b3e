"""The contract: every choice that can change a byte, in one frozen object with a fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tio_megatron.contract.families import FAMILIES
from tio_megatron.contract.families import family as family_of
from tio_megatron.contract.layout import Layout
from tio_megatron.contract.misfits import LayoutProblem, Side, powers_that_divide
from tio_megatron.contract.model import ModelShape
from tio_megatron.contract.tree import is_power_of_two
from tio_megatron.contract.vocab import VocabOrder
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import named, shown

VERSION = 2
"""Raised whenever a rule changes the bytes of any result."""

BY_FAMILY = -1
"""Default of a field that the kernel family sets: replaced by the family's value when the contract is made."""


@dataclass(frozen=True)
class Cuts:
    """Leaves per axis that a layout may cut; each a power of two, at least the largest TP or ETP either side will use.

    ``attn_row`` K of the attention output projection; ``mlp_row`` K of a dense MLP's down projection; ``expert_row`` the same of an
    expert; ``col_dgrad`` the output axis of column-parallel products, in their input gradient; ``expert_col_dgrad`` the same of
    an expert; ``vocab`` runs of the vocabulary.
    """

    attn_row: int = 8
    mlp_row: int = 8
    expert_row: int = 8
    col_dgrad: int = 8
    expert_col_dgrad: int = 8
    vocab: int = 8

    def __post_init__(self) -> None:
        for name in [field.name for field in dataclasses.fields(self)]:  # not asdict, which copies whatever was given, however deep
            count = getattr(self, name)
            if type(count) is not int or not is_power_of_two(count):
                raise ValueError(f"contract: cuts.{name} must be a power of two, got {shown(count)}")

    @classmethod
    def uniform(cls, count: int) -> Cuts:
        """The same count on every axis."""
        return cls(**{f.name: count for f in dataclasses.fields(cls)})


_CUTS_BY_FAMILY = Cuts()


@dataclass(frozen=True)
class Contract:
    """The order of every sum. Two sides whose contracts have one fingerprint agree byte for byte.

    Args:
        cuts: leaves per axis; the family has defaults.
        family: kernel family, which fixes the order inside a leaf.
        chain: terms of one chain inside a leaf of a product, 0: the leaf is one chain (set by the family).
        row_chain: the same in a sum over one row, such as a norm's (set by the family).
        router_chain: the same in the router's softmax over experts (set by the family).
        kv_block: keys per block of the attention walk (set by the family).
        vocab_block: vocabulary rows per block of the log-softmax.
        grain: positions per grain of a sum over tokens.
        version: version of these rules.

    Raises:
        ValueError: an unknown family or version, or a value the family does not allow.

    >>> Contract() == Contract.from_json(Contract().to_json())
    True
    >>> Contract.for_layouts(Layout(tp=2, ep=2, etp=1), Layout.for_vllm(tp=4)).cuts.attn_row
    4
    """

    cuts: Cuts = _CUTS_BY_FAMILY
    family: str = "cpu"
    chain: int = BY_FAMILY
    row_chain: int = BY_FAMILY
    router_chain: int = BY_FAMILY
    kv_block: int = BY_FAMILY
    vocab_block: int = 128
    grain: int = 512
    version: int = VERSION

    def __post_init__(self) -> None:
        # A float or bool that equals the right number would print, and so hash, as another contract.
        for name in ("chain", "row_chain", "router_chain", "kv_block", "vocab_block", "grain", "version"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"contract: {name} must be a whole number, got {shown(getattr(self, name))}")
        if not isinstance(self.family, str) or not isinstance(self.cuts, Cuts):
            raise ValueError(f"contract: family must be a name and cuts a Cuts, got {shown(self.family)} and {shown(self.cuts)}")
        if self.version != VERSION:
            raise ValueError(f"contract: version {shown(self.version)} is not the version of this package, {VERSION}")
        family = family_of(self.family)
        if self.cuts is _CUTS_BY_FAMILY:
            object.__setattr__(self, "cuts", Cuts(**family.cuts))
        for name, value in family.fields.items():
            if getattr(self, name) == BY_FAMILY:
                object.__setattr__(self, name, value)
            if getattr(self, name) != value:
                raise ValueError(f"contract: family {self.family!r} has {name} {value}, got {shown(getattr(self, name))}")
        if self.vocab_block != 128:
            raise ValueError(f"contract: vocab_block must be 128, got {shown(self.vocab_block)}")
        if self.grain < 1:
            raise ValueError(f"contract: grain must be positive, got {shown(self.grain)}")

    @classmethod
    def for_layouts(cls, *layouts: Layout, **fields: Any) -> Contract:
        """The smallest cuts that serve every given layout (usually trainer and rollout).

        Raises:
            ValueError: no layout is given, or no cuts serve one of them.
        """
        if not layouts:
            raise ValueError("contract: for_layouts needs at least one layout")
        for layout in layouts:
            if not layout.on_leaves:
                raise ValueError(f"contract: no cuts serve {layout}: leaves are powers of two, so tp and etp must be powers of two")
        tp = max(layout.tp for layout in layouts)
        etp = max(layout.expert_tp for layout in layouts)
        cuts = Cuts(attn_row=tp, mlp_row=tp, expert_row=etp, col_dgrad=tp, expert_col_dgrad=etp, vocab=tp)
        return cls(cuts=cuts, **fields)

    def vocab_order(self, vocab: int) -> VocabOrder:
        """The order of sums over a vocabulary of ``vocab`` true rows."""
        return VocabOrder(vocab, self.cuts.vocab, self.vocab_block)

    def leaves_of(self, axis: str, length: int, parts: int, where: str) -> int:
        """Leaves held by each of ``parts`` equal shards of an axis of ``length`` terms; ``axis`` is a field of :class:`Cuts`.

        Raises:
            ValueError: the axis does not divide into leaves, or the cut does not fall on them; says what would work for this product alone.
        """
        leaves = dataclasses.asdict(self.cuts).get(axis)
        if leaves is None:
            raise ValueError(f"contract: no cuts on an axis {axis!r}; known are {[f.name for f in dataclasses.fields(Cuts)]}")
        if length % leaves:
            powers = powers_that_divide(length)
            fits = [c for c in powers if parts > 0 and c % parts == 0]
            works = f"cuts.{axis} in {fits} would work" if fits else f"cuts.{axis} = {powers[-1]} with {powers_that_divide(powers[-1])} parts would work"
            raise ValueError(f"{where}: {length} terms do not divide into cuts.{axis} = {leaves} equal leaves; {works}")
        if parts < 1 or leaves % parts:
            more = f", or cuts.{axis} = {parts}" if is_power_of_two(parts) and length % parts == 0 else ""
            raise ValueError(f"{where}: cut into {parts} parts, but cuts.{axis} = {leaves} leaves; sizes {powers_that_divide(leaves)} would work{more}")
        return int(leaves) // parts

    def problems(self, layout: Layout, model: ModelShape, *, serving: bool = False) -> Iterator[LayoutProblem]:
        """Every product of ``model`` whose cut by ``layout`` does not fall on leaves, every part that does not divide, and every size that the
        family's kernels refuse.

        Args:
            layout: of the side that is built.
            model: sizes.
            serving: that side is vLLM, which reads its keys from pages and cuts experts by ``tp``.
        """
        return self.side(model, serving=serving).problems(layout)

    def side(self, model: ModelShape, *, serving: bool = False) -> Side:
        """``model`` under this contract, to be asked which layouts and sizes fit; arguments as :meth:`problems`."""
        return Side(dataclasses.asdict(self.cuts), self.family, model, serving)

    def check(self, layout: Layout, model: ModelShape, *, serving: bool = False) -> None:
        """Refuse a layout whose cuts do not fall on leaves; arguments as :meth:`problems`.

        Raises:
            ValueError: lists every such product and what would work.
        """
        found = [str(problem) for problem in self.problems(layout, model, serving=serving)]
        if found:
            raise ValueError(f"layout {layout} does not fit the contract:\n  " + "\n  ".join(found))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for reports and for exchange between sides."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: not JSON, an unknown field, or a value the constructor refuses.
        """
        try:
            data = read_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"contract: not JSON ({error})") from error
        if not isinstance(data, dict):
            raise ValueError(f"contract: expected a JSON object, got {type(data).__name__}")
        cuts = data.pop("cuts", {})
        if not isinstance(cuts, dict):
            raise ValueError(f"contract: cuts must be a JSON object, got {shown(cuts)}")
        for names, given, what in ((cls, data, "field"), (Cuts, cuts, "cut")):
            unknown = sorted(set(given) - {f.name for f in dataclasses.fields(names)})
            if unknown:
                raise ValueError(f"contract: unknown {what} {named(unknown)}; known are {', '.join(f.name for f in dataclasses.fields(names))}")
        if cuts:
            name = data.get("family", "cpu")
            by_family = FAMILIES[name].cuts if isinstance(name, str) and name in FAMILIES else {}
            data["cuts"] = Cuts(**{**by_family, **cuts})
        return cls(**data)

    def fingerprint(self, kernels: str = "") -> str:
        """16 hex digits over the contract and ``kernels``, the version string of the kernel family in use."""
        return hashlib.sha256(f"{self.to_json()}|{kernels}".encode()).hexdigest()[:16]

    def differences(self, other: Contract) -> list[str]:
        """The fields in which two contracts differ, as ``name: ours / theirs``."""
        ours, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        return [f"{name}: {ours[name]} / {theirs[name]}" for name in ours if ours[name] != theirs[name]]


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    cuts = {f"cuts.{name}": count for name, count in fields["cuts"].items()}
    return {**{name: value for name, value in fields.items() if name != "cuts"}, **cuts}
