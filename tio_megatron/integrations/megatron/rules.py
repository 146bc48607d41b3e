"""How an option that a contract cannot obey is refused: by its name, with its value, the reason and what works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OFF = (False, None)
"""What most switches must be."""


@dataclass(frozen=True)
class Rule:
    """``option`` must have one of the values ``works``."""

    option: str
    works: tuple[Any, ...]
    why: str

    def broken_by(self, source: Any) -> str | None:
        """One line when ``source`` (a config, or the arguments of a model) breaks the rule."""
        value = source.get(self.option, self.works[0]) if isinstance(source, Mapping) else getattr(source, self.option, self.works[0])
        if any(value is work or value == work for work in self.works):
            return None
        return f"{self.option}={_name(value)}: {self.why}; {' or '.join(_name(work) for work in self.works)} would work"


def broken(rules: tuple[Rule, ...], source: Any) -> list[str]:
    """One line for each rule that ``source`` breaks."""
    return [line for rule in rules if (line := rule.broken_by(source))]


def _name(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)
