"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

KINDS = {
    "equal": "nothing differs",
    "order": "operator order: equal inputs, the same formula, another order of adding",
    "framework": "framework difference: the sides do not compute the same formula on the same inputs",
    "weights": "weights: the sides do not hold the same parameters",
    "routing": "routing: the sides choose other experts",
    "unfinished": "one run did not end",
    "unknown": "could not tell why",
}


@dataclass(frozen=True)
class Finding:
    """The first difference.

    ``kind`` is a key of :data:`KINDS`, ``cause`` an anchor of ``docs/divergence.md``. ``point`` is where, ``layer`` its layer or None, ``rows`` how many
    tokens differ there and ``first`` the first of them as (sequence, position). ``parameter`` is an HF name where a parameter is at fault. ``side``
    is the side that is off ("A", "B", or "" where that cannot be told), ``side_reason`` why that one, or why none. ``details`` are for machines
    (``order_a``, ``temperature_b``), ``evidence`` and ``cure`` sentences, ``routing`` what happens to the choice of experts from there on. ``one_sided``
    counts points where one side lacks tokens that it has elsewhere and the other side has here: what was not compared is not equal.
    """

    kind: str
    cause: str = ""
    point: str = ""
    layer: int | None = None
    rows: int = 0
    compared: int = 0
    first: tuple[int, int] | None = None
    parameter: str = ""
    side: str = ""
    side_reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    cure: str = ""
    routing: tuple[str, ...] = ()
    one_sided: int = 0

    @property
    def status(self) -> int:
        """0 equal, 1 differs, 2 could not tell."""
        if self.kind == "equal":
            return 0 if self.compared and not self.one_sided else 2
        return 2 if self.kind == "unknown" else 1

    @property
    def verdict(self) -> str:
        """One line."""
        if self.kind == "equal":
            if self.compared and self.one_sided:
                return f"could not tell: {self.one_sided} points have tokens on one side only; what both have at {self.compared} points is equal"
            return f"equal: {self.compared} points" if self.compared else "could not tell: the traces have no token at any point in common"
        where = f" at {self.point}" if self.point else ""
        parameter = f" ({self.parameter})" if self.parameter else ""
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.kind}{cause}{where}{parameter}"

    def noting(self, *evidence: str) -> Finding:
        """The same with further evidence."""
        return replace(self, evidence=(*self.evidence, *evidence))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and words; ``side`` is None where none is named."""
        return {"verdict": self.verdict, **asdict(self), "side": self.side or None}
