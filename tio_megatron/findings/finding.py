"""What is found about a run, before it or at its start: one record, and rows by which options are judged. Sentences are made where they are shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tio_megatron.findings.messages import say, shown

Level = Literal["ok", "note", "bad", "unknown"]
LEVELS: tuple[Level, ...] = ("ok", "note", "unknown", "bad")
"""From good to bad. ``note`` changes no byte but is worth knowing; ``unknown`` could not be looked at here. A start refuses what is ``bad``."""

OFF = (False, None)
"""What most switches must be."""


class _Unsaid:
    """The value of a finding that is about no option, or about one whose value its reason tells."""

    def __repr__(self) -> str:
        return "UNSAID"


UNSAID = _Unsaid()


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Args:
        why: the reason; without an option, all that was found.
        works: what would work, as a person would write it; empty where there is nothing to do.
        option: its name, as whoever reads it spells it.
        value: the option's, where there is one.
        side: whose option (``trainer``, ``rollout``, ``ref``, ``verl``); empty at a start, where there is one side.
        origin: who said the value, where nobody wrote it.
        values: those that would work, where the row of a table names them.
        level: how bad it is.
        topic: groups findings.
    """

    why: str
    works: str = ""
    option: str = ""
    value: Any = field(default=UNSAID, hash=False)
    side: str = ""
    origin: str = ""
    values: tuple[Any, ...] = field(default=(), hash=False)
    level: Level = "bad"
    topic: str = "options"

    @property
    def what(self) -> str:
        """Everything but what would work.

        >>> Finding("random", option="dropout", value=0.1, side="trainer", origin="the default").what
        'trainer: dropout=0.1 (the default): random'
        """
        said = "" if self.value is UNSAID else f"={name_of(self.value)}"
        origin = f" ({self.origin})" if self.origin else ""
        head = f"{self.option}{said}{origin}" if self.option else ""
        return ": ".join(part for part in (self.side, head, self.why) if part)

    def __str__(self) -> str:
        return f"{self.what}; {self.works}" if self.works else self.what

    def to_dict(self) -> dict[str, str]:
        """Plain data, for reports."""
        return {"level": self.level, "topic": self.topic, "side": self.side, "option": self.option, "what": self.what, "works": self.works}


@dataclass(frozen=True)
class Rule:
    """A row: ``option`` must have one of the values ``works``, because of ``why``; ``instead`` says what would work where the values do not."""

    option: str
    works: tuple[Any, ...]
    why: str
    instead: str = ""

    def broken_by(self, source: Any) -> Finding | None:
        """What is found where ``source`` (a configuration, or the arguments of a model) breaks the rule. What it does not have keeps it."""
        value = source.get(self.option, self.works[0]) if isinstance(source, Mapping) else getattr(source, self.option, self.works[0])
        if any(value is work or value == work for work in self.works):
            return None
        works = self.instead or f"{' or '.join(name_of(work) for work in self.works)} would work"
        return Finding(self.why, works, self.option, value, values=self.works)


def broken(rules: Iterable[Rule], source: Any) -> list[Finding]:
    """What is found of each rule that ``source`` breaks."""
    return [finding for rule in rules if (finding := rule.broken_by(source)) is not None]


def refuse(heading: str, findings: Iterable[object]) -> None:
    """End a start with everything that was found, each in a line of its own.

    Raises:
        ValueError: there is something.
    """
    if lines := [str(finding) for finding in findings]:
        raise ValueError(f"{heading}:\n  " + "\n  ".join(lines))


DRY_RUN = "TIO_DRY_RUN"
"""``1``: a start ends with its verdict, and nothing is trained or served."""


def dry_run() -> bool:
    """Whether this start is to end with its verdict."""
    return os.environ.get(DRY_RUN, "").strip() not in ("", "0")


def verdict(heading: str, findings: Iterable[object]) -> None:
    """The last judgement of a start: :func:`refuse`; in a dry run the verdict on standard output, and the end of the process: 0 nothing forbids it, 1.

    Raises:
        ValueError: there is something, and this is no dry run.
    """
    lines = [str(finding) for finding in findings]
    if not dry_run():
        return refuse(heading, lines)
    if os.environ.get("RANK", "0") == "0":
        say("\n  ".join([f"{heading}:", *lines]) if lines else "tio_megatron: nothing forbids it (TIO_DRY_RUN: nothing is trained or served)")
    raise SystemExit(1 if lines else 0)


def unjudged(why: str) -> None:
    """Without a contract a dry run has nothing to judge by: status 2, and nothing starts. Harmless where it is none."""
    if dry_run():
        say(f"tio_megatron: {why}, so there is nothing to judge by ({DRY_RUN}: nothing is trained or served)")
        raise SystemExit(2)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among them; ``ok`` of none.

    >>> worst([Finding("b", level="note"), Finding("b")])
    'bad'
    """
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def name_of(value: Any) -> str:
    """A value in a message: a function by its name."""
    return str(value.__name__) if callable(value) and hasattr(value, "__name__") else shown(value, 200)
