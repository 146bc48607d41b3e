"""Values in error messages: whatever a file holds, the message stays one that a person can read."""

from __future__ import annotations

import os
import sys
from typing import Any

LONGEST = 60
"""Characters of a value in a message."""


def cut(text: str, longest: int = 300) -> str:
    """``text`` in one line, cut where it is long.

    >>> cut("one\\ntwo", 5)
    'one t...'
    """
    text = _plain(" ".join(text.split()))
    return text if len(text) <= longest else f"{text[:longest]}..."


def _plain(text: str) -> str:
    """Without what a terminal would obey, such as the escapes in a name that a file holds."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def shown(value: Any, longest: int = LONGEST) -> str:
    """``value`` for a message, cut where it is long; its type where Python cannot print it (thousands of digits, nested too deeply).

    >>> shown("x" * 100, 8), shown(10**5000), shown([1, 2])
    ("'xxxxxxx...", 'int', '[1, 2]')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= longest else f"{text[:longest]}..."


def named(names: list[str], most: int = 6, longest: int = LONGEST) -> str:
    """Some of ``names``, each cut where it is long, for a message.

    >>> named(["b", "a", "c"], most=2)
    'a, b and 1 more'
    """
    names = [_plain(name) for name in names]
    first = [name if len(name) <= longest else f"{name[:longest]}..." for name in sorted(names)[:most]]
    return ", ".join(first) + (f" and {len(names) - most} more" if len(names) > most else "")


def say(text: str) -> None:
    """``text`` and a new line on standard output; the rest is dropped where its reader has left (``| head``), so that the exit status stays the answer."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes standard output again when it ends, and would complain there.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
