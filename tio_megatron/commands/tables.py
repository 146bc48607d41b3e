"""Tables whose words can be copied: no option, name or number is cut or broken, however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_BORDERS = 3
"""Characters that a table adds to each column."""


def show_rows(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", styles: Sequence[str] = ()) -> None:
    """Print ``rows`` as a table where each column is at least as wide as its longest word; where the terminal is too narrow for that, row by row.

    In a file or a pipe a row is one line, so that it can be searched.

    Args:
        console: where to.
        headers: of the columns.
        rows: text of each cell.
        title: above the table.
        styles: of the first cell of each row, for terminals.
    """
    if not console.is_terminal:
        for line in ([title] if title else []) + ["  ".join(headers).strip(), *("  ".join(row).strip() for row in rows)]:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        return
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(headers, *rows, strict=True)]
    room = console.width - _BORDERS * len(headers) - 1
    if sum(least) <= room:
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        while sum(widths) > room:  # rich would make columns narrower than their words, or cut the last border
            widths[max((at for at in range(len(widths)) if widths[at] > least[at]), key=widths.__getitem__)] -= 1
        table = Table(title=title or None, title_justify="left")
        for header, width in zip(headers, widths, strict=True):
            table.add_column(header, width=width)
        for at, row in enumerate(rows):
            first = f"[{styles[at]}]{escape(row[0])}[/]" if styles else escape(row[0])
            table.add_row(first, *map(escape, row[1:]))
        console.print(table)
        return
    if title:
        console.print(title, style="italic", soft_wrap=True, highlight=False, markup=False)
    for at, row in enumerate(rows):
        for header, cell in zip(headers, row, strict=True):
            if cell:
                text = f"{header}: {cell}" if header else cell
                console.print(text, style=styles[at] if styles and cell == row[0] else None, soft_wrap=True, highlight=False, markup=False)
        console.print()


def counted(count: int, one: str, more: str) -> str:
    """A number and what it counts.

    >>> counted(1, "batch", "batches"), counted(2, "batch", "batches")
    ('1 batch', '2 batches')
    """
    return f"{count} {one if count == 1 else more}"
