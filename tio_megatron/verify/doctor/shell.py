"""Variables of a launch script, as far as it says them plainly. Nothing is run: what hangs on a condition, a command or a caller stays as it is written."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tio_megatron.verify.doctor.megatron_switches import is_switch

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_USED = re.compile(r"[$\x02](?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)([^{}$\x02`]*))?\})")
_NAMED = re.compile(r"[$\x02]\{?[!#]?([A-Za-z_]\w*)")
_SET_SOMEHOW = re.compile(r"(?<![\w.$\x02/-])([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=(?!=)|[$\x02]\{([A-Za-z_]\w*):?=")
_ARITHMETIC = re.compile(r"\(\((.*?)\)\)", re.DOTALL)
_COUNTED = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:\+\+|--|[-+*/%&|^<>]*=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SAID = re.compile(r"\becho\b[^\n]*|\bprintf\b(?! +-v)[^\n]*")
"""What is printed for people."""
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*(['\"\\]?)([A-Za-z_]\w*)['\"]?([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
_ANY = re.compile(
    r"(?<![\w./-])(?:eval\s[^\n;]*[$\x02\x03]|(?:declare|export|local|typeset|readonly)\s+(?:\x03|[^\n;=]*[$\x02\x03][^\n;]*=)"
    r"|(?:declare|local|typeset)\s+-\w*n|printf\s+-v\s*\"?[$\x02\x03]|read\s(?:[^\n;]*\s)?\"?[$\x02\x03])"
)
"""What sets a variable whose name is not written."""
_OPEN, _CLOSE = frozenset("if for while until case select {".split()), frozenset("fi done esac }".split())
_BEFORE = frozenset("then do else elif ! export readonly declare local typeset".split())
"""Words behind which a command, and so an assignment, can begin."""
_SETTERS = frozenset("read unset mapfile readarray getopts for select let printf".split())
END = "-"
"""Like an option, it ends the values of the one before it."""
_MARKS = "\n;&|()<>"
_SINGLE = frozenset({*_MARKS, "&&", "||"})
_STARTS = re.compile(r"(?:^|/)(?:torchrun|vllm|deepspeed|python[\d.]*)$|\.py$|^(?:verl|torch|vllm)\.")
"""A word by which a command is a run."""
_ALONE = re.compile(r"[$\x02](?:[A-Za-z_]\w*|\{[A-Za-z_]\w*[^\[\]]*\})")
_NAME_LEFT = re.compile(r"(?:\+{0,2}|--)[^=\s]*[$\x02\x03][^=\s]*[.}\w-]=")
"""An option whose name is not known."""
_CALLERS = re.compile(r"[$\x02](?:[@*]|\{[@*][^}]*\}|\{\w+\[[@*]\]\})")
"""A caller's arguments, or an array, whose words are read where they stand."""
_LISTED = re.compile(r"[$\x02]\{([A-Za-z_]\w*)\[[@*]\]\}")
_PLAIN, _QUOTED, _OUTPUT = "\x01", "\x02", "\x03"
"""Stand for a dollar sign that the shell takes for itself (behind a backslash, in single quotes), for one in double quotes, where nothing is split, and
for what a command or arithmetic would put in."""
_DOLLARS = str.maketrans({_PLAIN: "$", _QUOTED: "$", _OUTPUT: "$(...)"})
_HARMLESS = frozenset("set_env.sh setvars.sh activate .bashrc .bash_profile profile conda.sh setenv.bash bashrc".split())
"""Files that set paths: of CANN, oneAPI, virtual environments and shells."""


class Variables:
    """What a script sets, and what it leaves to the environment.

    A variable is known if every place that gives it a value is an assignment on its own, outside of any condition, loop, function and subshell, if all
    of them give it the same one, and if nothing uses it before.

    Args:
        script: its text.
        environment: of the process that would run it.
    """

    def __init__(self, script: str, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.taken: dict[str, str] = {}
        """Variables that :meth:`fill` has put in, in the order of their use."""
        self.reads: list[str] = []
        """Other files that the script reads. Any but those that set paths may set every variable: none is known then."""
        outer, bodies = apart(script)
        outer = literal(outer)
        self._tokens = tokens = list(_tokens(outer))
        somehow = Counter(_names(_SET_SOMEHOW, _SAID.sub("", "\n".join([outer, *bodies]))))
        self._unknown = {name for part in _ARITHMETIC.findall(script) for name in _names(_COUNTED, part)}
        self._nothing = bool(_ANY.search(outer))
        self._read(tokens)
        self._nothing = self._nothing or any(name.rpartition("/")[2] not in _HARMLESS for name in self.reads)
        self._unknown |= {name for name, times in somehow.items() if times > self._plain[name]}
        self._read(tokens)  # again, so that nothing rests on what turned out to be unknown
        self.conditional: frozenset[str] = frozenset()
        """Of :meth:`words`, those in a condition, a loop or a function."""
        self.holes = list(dict.fromkeys(self._holes(tokens)))
        """Words of a run that are a variable alone and not known: they may hold options."""

    def words(self) -> list[str]:
        """The script's words, filled in; :data:`END` where a command ends."""
        found: list[str] = []
        inside = 0
        self.conditional = frozenset(word.lstrip("+") for at in self._held_back if at not in self._assignments for word in self.fill(self._tokens[at]))
        for at, token in enumerate(self._tokens):
            if token in _SINGLE:
                inside = max(0, inside + (token == "(") - (token == ")"))
                if not (inside and token == "\n"):  # an array goes on
                    found.append(END)
            elif inside or self._tokens[at + 1 : at + 2] != [")"]:  # a pattern of a case is no word
                found += [token.translate(_DOLLARS)] if at in self._assignments else self.fill(token) if not _CALLERS.fullmatch(token) else []
        return found

    def fill(self, word: str) -> list[str]:
        """A word as the shell would hand it on: several where a variable alone holds several. What is not known stays.

        >>> Variables("TP=${TP:-4}; both=$((TP * 2)); more='--pp 2'", {}).fill("a.b=${TP}")
        ['a.b=4']
        >>> Variables("if x; then TP=2; fi; more='--pp 2 --x'", {}).fill("$TP"), Variables("more='--pp 2 --x'", {}).fill("$more")
        (['$TP'], ['--pp', '2', '--x'])
        """
        filled = self._filled(word, self.taken)
        words = filled.split() if filled != word and word[0] == "$" and _USED.fullmatch(word) else [filled]
        return [one.translate(_DOLLARS) for one in words]

    def _filled(self, text: str, taken: dict[str, str]) -> str:
        def value(found: re.Match[str]) -> str:
            name, how, other = found[1] or found[2], found[3] or "", found[4]
            held = None if name in self._unknown else self._values.get(name, self._environment.get(name))
            if self._nothing or name in self._unknown or (held is None and other is None):
                return found[0]
            if other is not None and (held is None or (held == "" and ":" in how)):
                held = other
            if held is None or (_OUTPUT in held and len(held.split()) == 1):
                return found[0]
            if not _open(held):
                taken[name] = held
            return held

        for _ in range(8):  # the innermost of ${A:-${B:-1}} first
            before, text = text, _USED.sub(value, text)
            if text == before:
                break
        return text

    def _read(self, tokens: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        self._plain: Counter[str] = Counter()
        self.reads.clear()
        self._held_back: list[int] = []
        self._assignments: set[int] = set()
        used: set[str] = set()
        depth = inside = 0
        begins, conditional, compared = True, False, False
        for at, token in enumerate(tokens):
            before, after = tokens[at - 1] if at else "\n", tokens[at + 1] if at + 1 < len(tokens) else "\n"
            if token in _SINGLE:
                inside = max(0, inside + (token == "(") - (token == ")"))  # a pattern of a case closes what nothing opened
                conditional = token in ("&&", "||", "|") or (conditional and (token not in ("\n", ";") or before in ("&&", "||", "|")))
                begins = token not in ("<", ">")
                continue
            compared = (compared or (begins and token == "[[")) and token != "]]"
            begins = begins and not compared
            assigned = _ASSIGNED.fullmatch(token)
            if begins and not inside and after != ")":  # which ends a pattern
                depth += (token in _OPEN) - (token in _CLOSE)
            if begins and token in ("source", ".") and after not in _SINGLE:
                self.reads.append(after.translate(_DOLLARS))
            if begins and token in _SETTERS:
                self._unknown |= {name for word in _until_mark(tokens, at + 1) for name in re.findall(r"^[A-Za-z_]\w*", word)}
            if assigned and begins:
                self._assignments.add(at)
                alone = all(_ASSIGNED.fullmatch(word) for word in _until_mark(tokens, at + 1))
                end = next((mark for mark in tokens[at + 1 :] if mark in _SINGLE), "\n")
                plain = depth == inside == 0 and not conditional and assigned[2] == "=" and alone and end in ("\n", ";")
                self._set(assigned[1], assigned[3], plain=plain and assigned[1] not in used)
                used |= {name for name in _NAMED.findall(assigned[3]) if name != assigned[1]}
            else:
                used |= set(_NAMED.findall(token))
            if depth or conditional:
                self._held_back.append(at)
            begins = before == "function" or (begins and (token in _OPEN or token in _BEFORE or bool(assigned)))

    def _holes(self, tokens: Sequence[str]) -> Iterator[str]:
        """Of the commands that start something, and of the arrays that a script hands on."""
        handed = {name for token in tokens for name in _LISTED.findall(token)}
        filled: set[str] = set()
        for command in _commands(tokens):
            array = _ASSIGNED.fullmatch(command[0])
            array = array if array and not array[3] and command[1:2] == ["("] else None
            if array:
                filled.add(array[1])
            asks = command[0] in ("[", "[[", "if", "elif", "{", "echo", "printf", "case", "while", "until", "for")
            if not (array and array[1] in handed) and (asks or not any(_STARTS.search(word) for word in command)):
                continue
            for previous, word in itertools.pairwise(command):
                listed = _LISTED.fullmatch(word)
                if listed and listed[1] not in filled:
                    yield word.translate(_DOLLARS)
                elif previous.startswith("--") and "=" not in previous and not is_switch(previous):
                    continue  # its value
                else:
                    found = self._filled(word, {})
                    pieces = found.split() if word[0] == "$" else [found]
                    if any(_ALONE.fullmatch(piece) or piece[0] == _OUTPUT or _NAME_LEFT.match(piece) for piece in pieces if piece):
                        yield word.translate(_DOLLARS)

    def _set(self, name: str, text: str, *, plain: bool) -> None:
        value = self._filled(text, {})
        known = name not in self._values or self._values[name] == value
        if plain and known and not value.endswith(("$", _QUOTED)):
            self._values[name] = value
            self._plain[name] += 1
            self._unknown |= {one for found in _USED.finditer(value) for one in found.group(1, 2) if one}  # what it was then, whatever is set later
        else:
            self._unknown.add(name)


def apart(script: str) -> tuple[str, list[str]]:
    """A script without its here-documents, and these."""
    bodies = [found[4] for found in _HEREDOC.finditer(script)]
    return _HEREDOC.sub(lambda found: found[3], script), bodies


def _end_of_output(script: str, start: int) -> int:
    """Behind ``$(...)``, ``$((...))`` or one in backquotes that begins at ``start``; 0 where nothing of that begins there, or it does not end."""
    if script[start] == "`":
        return script.find("`", start + 1) + 1
    if script[start + 1 : start + 2] != "(":
        return 0
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


def _open(text: str) -> bool:
    """Whether a variable is left in it."""
    return any(mark in text for mark in ("$", _QUOTED, _OUTPUT))


def _names(pattern: re.Pattern[str], text: str) -> list[str]:
    return [name for found in pattern.finditer(text) for name in found.groups() if name]


def literal(script: str) -> str:
    r"""The script with a mark for every dollar sign that is none of the shell's.

    >>> print(literal("a='$b' c=\"$d'$e'\" # it's $f").translate({1: "L", 2: "Q"}), literal(r"a=\$b `c` $((1+2))$(d)").translate({1: "L", 3: "O"}))
    a='Lb' c="Qd'Qe'"  a=Lb O OO
    """
    made: list[str] = []
    quote, at = "", 0
    while at < len(script):
        here = script[at]
        if here == "\\" and quote != "'" and script[at + 1 : at + 2] == "$":
            made.append(_PLAIN)
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
        if here in "$`" and quote != "'" and (end := _end_of_output(script, at)):
            made.append(_OUTPUT)
            at = end
            continue
        if here in "'\"" and quote in ("", here):
            quote = "" if quote else here
        own = here == "$" and (quote == "'" or (not quote and script[at + 1 : at + 2] in ("'", '"')))  # $'...' is no variable either
        made.append(_PLAIN if own else _QUOTED if here == "$" and quote else here)
        at += 1
    return "".join(made)


def _commands(tokens: Sequence[str]) -> Iterator[list[str]]:
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


def _until_mark(tokens: Sequence[str], start: int) -> Iterator[str]:
    """The rest of a command."""
    for token in tokens[start:]:
        if token in _SINGLE or token == "in":
            return
        yield token


def _tokens(script: str) -> Iterator[str]:
    """Words without their quotes, and the shell's own marks, ends of lines among them."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=_MARKS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    for token in lexer:
        if token:
            yield from re.findall(r"&&|\|\||.", token, re.DOTALL) if set(token) <= set(_MARKS) else [token]
