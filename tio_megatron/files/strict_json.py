"""Reads JSON that people or files give us: every name once, and no advice about the interpreter in a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tio_megatron.findings.messages import shown

_DIGITS = "set_int_max_str_digits"
"""In CPython's message about a number of thousands of digits, which advises the program to lift a limit that protects it."""


class GivenTwice(ValueError):
    """A name stands twice in one object: readers differ in which one they take."""


def read_json(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """What a JSON text holds.

    Args:
        text: of the document.
        parse_constant: called for ``NaN`` and the infinities, as :func:`json.loads` does.

    Raises:
        GivenTwice: an object has a name twice.
        ValueError: no JSON, or a number of more digits than are read.
        RecursionError: nested too deeply.

    >>> read_json('{"cuts": {"vocab": 4}}')
    {'cuts': {'vocab': 4}}
    >>> read_json('{"vocab": 4, "vocab": 8}')
    Traceback (most recent call last):
    ...
    tio_megatron.files.strict_json.GivenTwice: 'vocab' is given twice
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=parse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise plain(error) from None


def plain(error: ValueError) -> ValueError:
    """An error without CPython's advice about numbers of thousands of digits.

    >>> plain(ValueError("Exceeds the limit (4300 digits) ...: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit"))
    ValueError('a number has too many digits')
    """
    return ValueError("a number has too many digits") if _DIGITS in str(error) else error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise GivenTwice(f"{shown(name)} is given twice")
            seen.add(name)
    return found
