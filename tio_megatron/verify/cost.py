"""One line of what a contract costs, and the sizes of what travels."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATION, PARTIAL, SUM64 = 2, 4, 8
"""Bytes of bf16, fp32 and int64."""


@dataclass(frozen=True)
class Cost:
    """One line: ``ours`` and ``stock`` bytes per rank; ``per`` says of what, ``why`` what makes the difference."""

    what: str
    per: str
    ours: int
    stock: int
    why: str

    @property
    def extra(self) -> int:
        """Bytes more than stock's."""
        return self.ours - self.stock
