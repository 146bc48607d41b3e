"""``tio``: finds out whether two sides agree and, if not, where and why. ``python -m tio_megatron`` is the same.

Comparing and diagnosing recordings needs neither Megatron nor vLLM; only ``tio record`` of an engine imports that engine.
"""

from __future__ import annotations

from typing import Annotated

import typer

import tio_megatron
from tio_megatron.commands import diagnose, doctor, logdiff, matrix, plan, record, rollouts
from tio_megatron.commands.usage import JsonGroup

app = typer.Typer(
    name="tio",
    cls=JsonGroup,
    help="Is there a train-inference mismatch, where does it start, and what to change. Exit status: 0 equal, 1 differs, 2 could not tell.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command(epilog=logdiff.EPILOG)(logdiff.logdiff)
app.command(epilog=record.EPILOG)(record.record)
app.command(epilog=diagnose.EPILOG)(diagnose.diagnose)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=matrix.EPILOG)(matrix.matrix)
app.add_typer(rollouts.app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tio_megatron {tio_megatron.__version__}")
        raise typer.Exit(0)


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


def main() -> None:
    """The console script."""
    app(prog_name="tio")
