"""What a check has to say: one line, how bad it is, and what would work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "bad", "unknown"]
LEVELS: tuple[Level, ...] = ("ok", "note", "unknown", "bad")
"""From good to bad. ``note`` changes no byte but is worth knowing; ``unknown`` could not be looked at here."""


@dataclass(frozen=True)
class Finding:
    """``topic`` groups findings, ``what`` was found, ``works`` says what to do about it (empty when there is nothing to do)."""

    level: Level
    topic: str
    what: str
    works: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain data, for reports."""
        return dataclasses.asdict(self)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among them; ``ok`` of none.

    >>> worst([Finding("note", "a", "b"), Finding("bad", "a", "b")])
    'bad'
    """
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
