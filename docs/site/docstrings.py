"""Docstrings as the site shows them: examples (``>>>``) as blocks of code, roles (``:func:``) as plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?m)^[ \t]*>>> .*(?:\n(?![ \t]*$).*)*")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")


def shown(text: str) -> str:
    """Every run of lines from ``>>>`` to the next empty line between fences: bare, they would be quotations and their brackets links."""
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", _ROLE.sub(r"`\1`", text))


class Docstrings(griffe.Extension):
    """Applies :func:`shown` to every docstring of a package."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **_: Any) -> None:
        """All of a package has been read."""
        left: list[griffe.Object] = [pkg]
        while left:
            held = left.pop()
            if held.docstring is not None:
                held.docstring.value = shown(held.docstring.value)
            left += [member for member in held.members.values() if not member.is_alias]
