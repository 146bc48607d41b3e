"""What every subcommand shares: ``--json``, one line for bad input, and the exit status 0 equal, 1 differs, 2 could not tell."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import typer
from rich.console import Console

JSON = typer.Option("--json", help="Print one JSON object instead of text, also for errors.")


def tell(name: str, as_json: bool, work: Callable[[], tuple[int, dict[str, Any], Callable[[Console], None]]], *, first: bool = True) -> None:
    """Run ``work`` and leave with its status.

    Args:
        name: of the subcommand, for messages.
        as_json: print the object rather than the text.
        work: returns the exit status, an object for machines, and a function that prints it for people.
        first: whether this process prints the answer on stdout; of several ranks that share it, the first one does.

    Raises:
        typer.Exit: always; 2 where ``work`` raised ValueError, OSError or ImportError.
    """
    try:
        with stdout_to_stderr() if as_json else nullcontext(), other_packages_quiet():
            status, answer, show = work()
    except (ValueError, OSError, ImportError) as error:
        message = " ".join(str(error).split())
        if as_json and first:
            print(json.dumps({"status": 2, "error": message}))
        else:
            print(f"tio {name}: {message}", file=sys.stderr)
        raise typer.Exit(2) from None
    if not first:
        raise typer.Exit(status)
    if as_json:
        print(json.dumps(_finite({"status": status, **answer}), allow_nan=False))
    else:
        show(Console())
    raise typer.Exit(status)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What anybody in this process or its children prints meanwhile (vLLM's log) goes to stderr: stdout is for the answer alone."""
    sys.stdout.flush()
    held = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(held, 1)
        os.close(held)


@contextmanager
def other_packages_quiet() -> Iterator[None]:
    """Without warnings of other packages (megatron-core has five on import), which would stand before the one line of an error. ``-W`` and
    ``PYTHONWARNINGS`` bring them back."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.filterwarnings("ignore", module=r"(?!tio_megatron\b)")
        yield


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
