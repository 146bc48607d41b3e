"""Everything that people do wrong, a row each: what was given, and the one error that says so. ``python -m tests.bad_input.table`` writes docs/bad-input.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bad-input.md"
HEAD = """# Bad input

Made by `python -m tests.bad_input.table` from the rows of `tests/bad_input/`; each is a test. Whatever is wrong ends in one error that says what, where
and what would work: a `ValueError` in Python, and in a command one line and exit status 2. The folders are as before, and no process is left.
"""


@dataclass(frozen=True)
class Row:
    """``act(folder)`` prepares; what it returns is called, and raises ValueError with ``said`` in it. ``given`` says in words what is wrong."""

    part: str
    given: str
    said: str
    act: Callable[[Path], Callable[[], object]]

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.part}: {self.given}".replace("[", "(").replace("]", ")")


def rows() -> list[Row]:
    """All of them, in the order of the page."""
    from tests.bad_input import rows_checkpoint, rows_engines, rows_files, rows_job, rows_layers, rows_twice

    return [*rows_job.ROWS, *rows_checkpoint.ROWS, *rows_files.ROWS, *rows_twice.ROWS, *rows_engines.ROWS, *rows_layers.ROWS]


def page() -> str:
    """The table as Markdown."""
    lines, part = [HEAD], ""
    for row in rows():
        if row.part != part:
            part = row.part
            lines += [f"\n## {part[0].upper()}{part[1:]}\n", "| given | the error says |", "| --- | --- |"]
        given, said = (text.replace("|", "\\|") for text in (row.given, row.said))
        lines.append(f"| {given} | `{said}` |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    PAGE.write_text(page(), encoding="utf-8")
