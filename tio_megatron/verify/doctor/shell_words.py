"""A launch script cut into words and marks, by the rules of the shell. Nothing is run."""

from __future__ import annotations

import bisect
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PLAIN, QUOTED, OUTPUT, BLANK = "\x01", "\x02", "\x03", "\x04"
"""Stand for a dollar sign that the shell takes for itself (behind a backslash, in single quotes), for one in double quotes, where nothing is split, for
what a command or arithmetic would put in, and for a blank between the braces of a variable."""
DOLLARS = str.maketrans({PLAIN: "$", QUOTED: "$", OUTPUT: "$(...)", BLANK: " "})
"""For people: as it was written, more or less."""
_SIGNS = "\n;&|()<>"
MARKS = frozenset({*_SIGNS, "&&", "||"})
"""Words of the shell's own, as :func:`tokens` gives them."""
_DESCRIPTOR = re.compile(r"\d+(?=[<>])")
_HERE = re.compile(r"(?<!<)<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|([A-Za-z_][\w\\.-]*|\\[A-Za-z_][\w\\.-]*))")


def literal(script: str, outputs: list[str] | None = None) -> str:
    r"""The script without comments, with a mark for every dollar sign that is none of the shell's, and for every ``$(...)``, which are put into ``outputs``.

    >>> print(literal("a='$b' c=\"$d'$e'\" # it's $f").translate({1: "L", 2: "Q"}), literal(r"a=\$b `c` $((1+2))$(d)").translate({1: "L", 3: "O"}))
    a='Lb' c="Qd'Qe'"  a=Lb O OO
    """
    made: list[str] = []
    quote, at, whole, braces = "", 0, True, 0
    while at < len(script):
        here = script[at]
        if not quote:
            braces = 0 if here == "\n" else braces + (script[at : at + 2] == "${") - (here == "}" and braces > 0)
            if braces and here in " \t":
                made.append(BLANK)
                at += 1
                continue
        if here == "\\" and quote != "'" and script[at + 1 : at + 2] == "$":
            made.append(PLAIN)
            at += 2
            continue
        if here == "\\" and quote != "'":
            made.append(" " if script[at + 1 : at + 2] == "\n" else script[at : at + 2])
            at += 2
            continue
        if here.isdigit() and not quote and (at == 0 or script[at - 1] in " \t\n;&|()") and (found := _DESCRIPTOR.match(script, at)):
            at = found.end()  # 2> is a mark, 2 > is none
            continue
        if here == "#" and not quote and not braces and (at == 0 or script[at - 1] in " \t\n;&|()"):
            end = script.find("\n", at)
            at = len(script) if end < 0 else end
            continue
        if whole and quote != "'" and (here == "`" or script[at : at + 2] == "$("):
            end = _end_of_output(script, at)
            if end:
                if outputs is not None:
                    outputs.append(script[at:end])
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


@dataclass(frozen=True)
class Here:
    """A here-document: its text, and whether its quoted end keeps the shell from filling it in."""

    text: str
    quoted: bool


def apart(script: str) -> tuple[str, list[Here]]:
    """A script without its here-documents, and these.

    >>> apart("a <<X b\\nit's c\\n X\\nX\\nd")
    ('a  b\\nd', [Here(text="it's c\\n X", quoted=False)])
    """
    lines = script.split("\n")
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        for end in {line, line.lstrip("\t")}:
            places.setdefault(end, []).append(number)
    outer: list[str] = []
    bodies: list[Here] = []
    number = 0
    while number < len(lines):
        line, last = lines[number], number
        for here in _HERE.finditer(line):
            end = here[2] or here[3] or here[4].replace("\\", "")
            ends = places.get(end, [])
            at = bisect.bisect_right(ends, last)
            while at < len(ends) and not here[1] and lines[ends[at]] != end:  # only <<- has an end behind tabs
                at += 1
            if at < len(ends):
                bodies.append(Here("\n".join(lines[last + 1 : ends[at]]), end != here[4]))
                last = ends[at]
        outer.append(_HERE.sub("", line) if last > number else line)
        number = last + 1
    return "\n".join(outer), bodies


def tokens(script: str) -> Iterator[str]:
    """Words without their quotes, and the shell's own marks, ends of lines among them."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    for token in lexer:
        if token:
            yield from re.findall(r"&&|\|\||.", token, re.DOTALL) if set(token) <= set(_SIGNS) else [token]


def commands(tokens: Sequence[str]) -> Iterator[list[int]]:
    """Where the words of each command stand, and an array's parentheses. A command in parentheses belongs to what is around it, and so do the lines of an
    array; a pattern of a case belongs to nothing."""
    command: list[int] = []
    inside = 0
    for at, token in enumerate((*tokens, "\n")):
        before = tokens[at - 1] if at else "\n"
        if token == ")" and not inside:
            command = []  # the pattern of a case
        inside = max(0, inside + (token == "(") - (token == ")"))
        joined = token == "&" and (before in ("<", ">") or (at + 1 < len(tokens) and tokens[at + 1] == ">"))  # 2>&1, &> file
        if (token in (";", "&", "&&", "||", "|") and not joined) or (token == "\n" and not inside):
            if command:
                yield command
            command = []
        elif token not in MARKS or token in ("(", ")"):
            command.append(at)
