"""Variables of a launch script, as far as it says them plainly. Nothing is run: what hangs on a condition, a command or a caller stays as it is written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_USED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-=])([^{}$`]*))?\})")
_OPEN, _CLOSE = frozenset("if for while until case select { function".split()), frozenset("fi done esac }".split())
_BEFORE = frozenset("then do else elif ! export readonly declare local".split())
"""Words behind which a command, and so an assignment, can begin."""
_SETTERS = frozenset("read unset mapfile getopts for".split())
_MARKS = "\n;&|()<>"


class Variables:
    """What a script sets, and what it leaves to the environment.

    Args:
        script: its text.
        environment: of the process that would run it.
    """

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._values: dict[str, str] = {}
        self._unknown: set[str] = set()
        self.taken: dict[str, str] = {}
        """Variables that :meth:`fill` has put in, in the order of their use."""
        self.reads: list[str] = []
        """Other files that the script reads, which may set any variable."""
        self._read(list(_tokens(script)))

    def fill(self, word: str) -> list[str]:
        """A word as the shell would hand it on: several where a variable alone holds several. What is not known stays.

        >>> Variables("TP=${TP:-4}; both=$((TP * 2)); more='--pp 2'", {}).fill("a.b=${TP}")
        ['a.b=4']
        >>> Variables("if x; then TP=2; fi; more='--pp 2 --x'", {}).fill("$TP"), Variables("more='--pp 2 --x'", {}).fill("$more")
        (['$TP'], ['--pp', '2', '--x'])
        """
        if _ASSIGNED.fullmatch(word):
            return [word]
        filled = self._filled(word, self.taken)
        if filled != word and _USED.fullmatch(word):
            return shlex.split(filled)
        return [filled]

    def _filled(self, text: str, taken: dict[str, str]) -> str:
        def value(found: re.Match[str]) -> str:
            name, how, other = found[1] or found[2], found[3] or "", found[4]
            held = None if name in self._unknown else self._values.get(name, self._environment.get(name))
            if name in self._unknown or (held is None and other is None):
                return found[0]
            if other is not None and (held is None or (held == "" and ":" in how)):
                held = other
            if held is None:
                return found[0]
            if "$" not in held:
                taken[name] = held
            return held

        for _ in range(8):  # the innermost of ${A:-${B:-1}} first
            before, text = text, _USED.sub(value, text)
            if text == before:
                break
        return text

    def _read(self, tokens: Sequence[str]) -> None:
        depth, begins, conditional = 0, True, False
        for at, token in enumerate(tokens):
            following = tokens[at + 1] if at + 1 < len(tokens) else "\n"
            if token[0] in _MARKS:
                conditional = token.startswith(("&&", "||")) or (conditional and token[0] not in "\n;")
                begins = token[0] not in "<>"
                continue
            assigned = _ASSIGNED.fullmatch(token)
            if begins and token in _OPEN:
                depth += 1
            elif begins and token in _CLOSE:
                depth -= 1
            if begins and token in ("source", ".") and following[0] not in _MARKS:
                self.reads.append(following)
            if begins and token in _SETTERS:
                rest = iter(tokens[at + 1 :])
                for word in rest:
                    if word[0] in _MARKS or word == "in":
                        break
                    self._unknown.add(word)
            if assigned and begins:
                plain = depth == 0 and not conditional and assigned[2] == "=" and following[0] in "\n;"
                self._set(assigned[1], assigned[3], plain=plain)
            elif assigned:
                self._unknown.add(assigned[1])  # somebody else's word, or an assignment whose line did not end where it seemed to
            begins = begins and (token in _OPEN or token in _BEFORE or bool(assigned))

    def _set(self, name: str, text: str, *, plain: bool) -> None:
        value = self._filled(text, {})
        known = name not in self._values or self._values[name] == value
        if plain and known and "$(" not in value and "`" not in value and not value.endswith("$"):
            self._values[name] = value
            self._unknown |= {one for found in _USED.finditer(value) for one in found.group(1, 2) if one}  # what it was then, whatever is set later
        else:
            self._unknown.add(name)


def _tokens(script: str) -> Iterator[str]:
    """Words without their quotes, and runs of the shell's own marks, ends of lines among them."""
    lexer = shlex.shlex(_Lines(script.replace("\\\n", " ")), posix=True, punctuation_chars=_MARKS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    for token in lexer:
        if token:
            yield from re.findall(r"&&|\|\||.", token, re.DOTALL) if set(token) <= set(_MARKS) else [token]


class _Lines:
    """A stream for shlex, which skips a comment by reading its line; the line's end, a mark here, is left."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def read(self, size: int) -> str:
        """The next ``size`` characters."""
        self._at += size
        return self._text[self._at - size : self._at]

    def readline(self) -> str:
        """What is left of a line, without its end."""
        end = self._text.find("\n", self._at)
        line = self._text[self._at : end if end >= 0 else None]
        self._at += len(line)
        return line

    def close(self) -> None:
        """Nothing to close."""
