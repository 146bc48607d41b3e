"""``tio logdiff A B``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tio_megatron.commands.answer import JSON, tell
from tio_megatron.findings.messages import named

EPILOG = "Example: tio logdiff trainer.jsonl rollout.npz --html logdiff.html"


def logdiff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Recording of one side (the trainer, if there is one).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Recording of the other side (the rollout).")],
    field: Annotated[str | None, typer.Option(help="Name of the log-probabilities in both files, if they hold several.")] = None,
    field_a: Annotated[str | None, typer.Option(help="The same, in A only.")] = None,
    field_b: Annotated[str | None, typer.Option(help="The same, in B only.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plot there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page there.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compare two recordings of token log-probabilities, byte for byte.

    Reads JSONL (one object per sequence with "tokens" and "logprobs"; rollout dumps of verl too), safetensors and npz. With --field-a and --field-b
    both sides may be one file: tio logdiff 7.jsonl 7.jsonl --field-a old_log_probs --field-b rollout_log_probs. Of a folder its numbered *.jsonl are read.
    Exit status: 0 equal, 1 differs, 2 could not tell.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        from tio_megatron.files.whole import write_whole
        from tio_megatron.verify.logdiff import logdiff as compare
        from tio_megatron.verify.picture import draw, numbers, page
        from tio_megatron.verify.readers import files_of, read_scored

        folders = {str(path): files_of(path) for path in (a, b) if path.is_dir()}
        found = compare(read_scored(a, field_a or field), read_scored(b, field_b or field))
        if png:
            write_whole(png, draw(found, (str(a), str(b))))
        if html:
            write_whole(html, page(found, (str(a), str(b))).encode())

        def show(console: Console) -> None:
            for folder, (read, left) in folders.items():
                names = f"{read[0].name} to {read[-1].name}, {len(read)} files" if len(read) > 1 else read[0].name if read else "no file"
                out = f"; left out: {named([file.name for file in left])}" if left else ""
                console.print(f"{folder}: {names}{out}", highlight=False, markup=False, soft_wrap=True)
            console.print(found.verdict, style="green" if found.status == 0 else "red", highlight=False, soft_wrap=True)
            table = Table(show_header=False)
            for row in numbers(found):
                table.add_row(*row)
            console.print(table)
            if found.first:
                console.print(f"first: sequence {found.first.sequence}, position {found.first.position} ({found.first.bytes_a} / {found.first.bytes_b})")
                context = Table("position", "token", "A", "B")
                for at, token, x, y in found.first.context:
                    values = ["" if value is None else f"{value:.9g}" for value in (x, y)]
                    context.add_row(str(at), str(token), *values, style="bold red" if at == found.first.position else None)
                console.print(context)

        held = {"folders": {name: [[file.name for file in part] for part in parts] for name, parts in folders.items()}} if folders else {}
        return found.status, found.to_json() | held, show

    tell("logdiff", as_json, work)
