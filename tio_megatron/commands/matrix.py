"""``tio matrix``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tio_megatron.commands.answer import JSON, tell

EPILOG = "Example: tio matrix layouts.yaml --out out/matrix"


def matrix(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with model, tokens, trainers and rollouts; docs/doctor.md shows one.")],
    out: Annotated[Path, typer.Option(help="Folder for recordings, logs, report.json, matrix.png and matrix.html.")] = Path("out/matrix"),
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Run every trainer and every rollout of a table on one model, and compare all pairs.

    Each side ("megatron tp2+ep2", "stock vllm tp1", "hf float32") scores the same tokens once, in a process of its own.
    Exit status: 0 all pairs are equal, 1 some differ, 2 could not tell.
    """

    def work() -> tuple[int, dict[str, Any], Callable[[Console], None]]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from tio_megatron.files.whole import write_whole
        from tio_megatron.verify.matrix import heat
        from tio_megatron.verify.matrix.run import run
        from tio_megatron.verify.matrix.table import Table

        table = Table.from_file(file)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as bar:
            task = bar.add_task("", total=len(table.sides))

            def starts(side: Any) -> None:
                bar.update(task, description=str(side), completed=table.sides.index(side))

            cells = run(table, out, starts)
        import json

        report = {"pairs": [cell.to_dict() for cell in cells], "contract": table.contract.to_dict(), "fingerprint": table.contract.fingerprint()}
        write_whole(out / "report.json", json.dumps(report, indent=1).encode())
        write_whole(out / "matrix.png", heat.draw(cells))
        write_whole(out / "matrix.html", heat.page(cells).encode())

        def show(console: Console) -> None:
            console.print(heat.terminal(cells))
            console.print(f"{out / 'matrix.html'}: every pair, and the command that compares it again", highlight=False, soft_wrap=True)
            console.print(heat.summary(cells), highlight=False)

        return int(any(cell.found.status for cell in cells)), report, show

    tell("matrix", as_json, work)
