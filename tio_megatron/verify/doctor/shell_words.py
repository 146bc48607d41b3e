"""A launch script cut into words and marks, by the rules of the shell. Nothing is run."""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator, Sequence

PLAIN, QUOTED, OUTPUT = "\x01", "\x02", "\x03"
"""Stand for a dollar sign that the shell takes for itself (behind a backslash, in single quotes), for one in double quotes, where nothing is split, and
for what a command or arithmetic would put in."""
DOLLARS = str.maketrans({PLAIN: "$", QUOTED: "$", OUTPUT: "$(...)"})
"""For people: as it was written, more or less."""
_SIGNS = "\n;&|()<>"
MARKS = frozenset({*_SIGNS, "&&", "||"})
"""Words of the shell's own, as :func:`tokens` gives them."""
_HERE = re.compile(r"(?<!<)<<-?[ \t]*(['\"\\]?)([A-Za-z_]\w*)['\"]?")


def literal(script: str) -> str:
    r"""The script with a mark for every dollar sign that is none of the shell's.

    >>> print(literal("a='$b' c=\"$d'$e'\" # it's $f").translate({1: "L", 2: "Q"}), literal(r"a=\$b `c` $((1+2))$(d)").translate({1: "L", 3: "O"}))
    a='Lb' c="Qd'Qe'"  a=Lb O OO
    """
    made: list[str] = []
    quote, at, whole = "", 0, True
    while at < len(script):
        here = script[at]
        if here == "\\" and quote != "'" and script[at + 1 : at + 2] == "$":
            made.append(PLAIN)
            at += 2
            continue
        if here == "\\" and quote != "'":
            made.append(" " if script[at + 1 : at + 2] == "\n" else script[at : at + 2])
            at += 2
            continue
        if here == "#" and not quote and (at == 0 or script[at - 1] in " \t\n;&|()"):
            end = script.find("\n", at)
            at = len(script) if end < 0 else end
            continue
        if whole and quote != "'" and (here == "`" or script[at : at + 2] == "$("):
            end = _end_of_output(script, at)
            if end:
                made.append(OUTPUT)
                at = end
                continue
            whole = False  # one that does not end: no other is looked for
        if here in "'\"" and quote in ("", here):
            quote = "" if quote else here
        own = here == "$" and (quote == "'" or (not quote and script[at + 1 : at + 2] in ("'", '"')))  # $'...' is no variable either
        made.append(PLAIN if own else QUOTED if here == "$" and quote else here)
        at += 1
    return "".join(made)


def _end_of_output(script: str, start: int) -> int:
    """Behind ``$(...)``, ``$((...))`` or one in backquotes that begins at ``start``; 0 where it does not end."""
    if script[start] == "`":
        return script.find("`", start + 1) + 1
    inside, quote, at = 0, "", start + 1
    while at < len(script):
        here = script[at]
        if here == "\\" and quote != "'":
            at += 2
            continue
        if here in "'\"" and quote in ("", here):
            quote = "" if quote else here
        if not quote:
            inside += (here == "(") - (here == ")")
            if inside == 0:
                return at + 1
        at += 1
    return 0


def apart(script: str) -> tuple[str, list[str]]:
    """A script without its here-documents, and these.

    >>> apart("a <<X b\\nit's c\\nX\\nd")
    ('a  b\\nd', ["it's c"])
    """
    lines = script.split("\n")
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(number)
    outer: list[str] = []
    bodies: list[str] = []
    number = 0
    while number < len(lines):
        here = _HERE.search(lines[number])
        ends = places.get(here[2], []) if here else []
        at = bisect.bisect_right(ends, number)
        if here and at < len(ends):
            outer.append(_HERE.sub("", lines[number], count=1))
            bodies.append("\n".join(lines[number + 1 : ends[at]]))
            number = ends[at] + 1
        else:
            outer.append(lines[number])
            number += 1
    return "\n".join(outer), bodies


def tokens(script: str) -> Iterator[str]:
    """Words without their quotes, and the shell's own marks, ends of lines among them."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    for token in lexer:
        if token:
            yield from re.findall(r"&&|\|\||.", token, re.DOTALL) if set(token) <= set(_SIGNS) else [token]


def commands(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Cut where one ends; a command in parentheses belongs to what is around it, and so do the lines of an array."""
    command: list[str] = []
    inside = 0
    for token in (*tokens, "\n"):
        inside = max(0, inside + (token == "(") - (token == ")"))
        if token in (";", "&", "&&", "||", "|") or (token == "\n" and not inside):
            if command:
                yield command
            command = []
        elif token != "\n":
            command.append(token)
