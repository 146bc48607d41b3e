"""Errors of the command line itself (a missing argument, an option or subcommand that is not, a value that does not fit), as JSON where it is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
"""What errors of usage have in common: the package that declares it is typer's own affair and has changed."""


class JsonGroup(TyperGroup):
    """A group whose errors of usage are one JSON object on stdout, with exit status 2, if ``--json`` is among the arguments."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """As the base class'."""
        given = list(sys.argv[1:] if args is None else args)
        if not standalone_mode or not _wants_json(given):
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        try:
            status = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
        except _USAGE as error:
            _refuse(error)
        sys.exit(status if isinstance(status, int) else 0)


def _wants_json(arguments: list[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(word == "--json" or word.startswith("--json=") for word in options)


def _refuse(error: Any) -> NoReturn:
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "tio"
    message = " ".join(str(error.format_message()).split())
    print(json.dumps({"status": 2, "error": f"{message} (see {command} --help)"}))
    sys.exit(2)
