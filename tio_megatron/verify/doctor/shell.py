"""Variables of a launch script, as far as it says them plainly. Nothing is run: what hangs on a condition, a command or a caller stays as it is written."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tio_megatron.verify.doctor.megatron_switches import is_switch
from tio_megatron.verify.doctor.shell_words import DOLLARS, MARKS, OUTPUT, QUOTED, apart, commands, literal, tokens

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_USED = re.compile(r"[$\x02](?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)([^{}$\x02`]*))?\})")
_NAMED = re.compile(r"[$\x02]\{?[!#]?([A-Za-z_]\w*)")
_SET_SOMEHOW = re.compile(r"(?<![\w.$\x02/-])([A-Za-z_]\w*)(?:\[[^\]\n]{0,200}\])?\+?=(?!=)|[$\x02]\{([A-Za-z_]\w*):?=")
_COUNTED = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\n]{0,200}\])?\s*(?:\+\+|--|[-+*/%&|^<>]*=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SAID = re.compile(r"\becho\b[^\n]*|\bprintf\b(?! +-v)[^\n]*")
"""What is printed for people."""
_OPEN, _CLOSE = frozenset("if for while until case select {".split()), frozenset("fi done esac }".split())
_BEFORE = frozenset("then do else elif ! export readonly declare local typeset".split())
"""Words behind which a command, and so an assignment, can begin."""
_DECLARES = frozenset("export readonly declare local typeset".split())
_SETTERS = frozenset("read unset mapfile readarray getopts for select let printf eval".split())
_STARTS_WITH = re.compile(r"^[A-Za-z_]\w*")
MOST = 1 << 16
"""Characters that a variable may hold, and a 64th of those that are put in altogether: a script may double a string again and again."""
END = "-"
"""Like an option, it ends the values of the one before it."""
_STARTS = re.compile(r"(?:^|/)(?:torchrun|vllm|deepspeed|python[\d.]*)$|\.py$|^(?:verl|torch|vllm)\.")
"""A word by which a command is a run."""
_ALONE = re.compile(r"[$\x02](?:[A-Za-z_]\w*|\{[A-Za-z_]\w*[^\[\]]*\})")
_NAME_LEFT = re.compile(r"(?:\+{0,2}|--)[^=\s]*[$\x02\x03][^=\s]*[.}\w-]=")
"""An option whose name is not known."""
_CALLERS = re.compile(r"[$\x02](?:[@*]|\{[@*][^}]*\}|\{\w+\[[@*]\]\})")
"""A caller's arguments, or an array, whose words are read where they stand."""
_LISTED = re.compile(r"[$\x02]\{([A-Za-z_]\w*)\[[@*]\]\}")
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
        self._filled_in = 0
        self.taken: dict[str, str] = {}
        """Variables that :meth:`fill` has put in, in the order of their use."""
        self.reads: list[str] = []
        """Other files that the script reads. Any but those that set paths may set every variable: none is known then."""
        outer, bodies = apart(script)
        outer = literal(outer)
        self._tokens = list(tokens(outer))
        somehow = Counter(_names(_SET_SOMEHOW, _SAID.sub("", "\n".join([outer, *bodies]))))
        self._unknown = {name for part in _arithmetic(script) for name in _names(_COUNTED, part)}
        self._nothing = False
        self._read()
        self._nothing |= any(name.rpartition("/")[2] not in _HARMLESS for name in self.reads)
        self._unknown |= {name for name, times in somehow.items() if times > self._plain[name]}
        self._read()  # again, so that nothing rests on what turned out to be unknown
        self.conditional: frozenset[str] = frozenset()
        """Of :meth:`words`, those in a condition, a loop or a function."""
        self.holes = list(dict.fromkeys(self._holes()))
        """Words of a run that are a variable alone and not known: they may hold options."""

    def words(self) -> list[str]:
        """The script's words, filled in; :data:`END` where a command ends."""
        found: list[str] = []
        inside = 0
        self.conditional = frozenset(word.lstrip("+") for at in self._held_back if at not in self._assignments for word in self.fill(self._tokens[at]))
        for at, token in enumerate(self._tokens):
            if token in MARKS:
                inside = max(0, inside + (token == "(") - (token == ")"))
                if not (inside and token == "\n"):  # an array goes on
                    found.append(END)
            elif inside or self._tokens[at + 1 : at + 2] != [")"]:  # a pattern of a case is no word
                found += [token.translate(DOLLARS)] if at in self._assignments else self.fill(token) if not _CALLERS.fullmatch(token) else []
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
        return [one.translate(DOLLARS) for one in words]

    def _filled(self, text: str, taken: dict[str, str]) -> str:
        def value(found: re.Match[str]) -> str:
            name, how, other = found[1] or found[2], found[3] or "", found[4]
            held = None if name in self._unknown else self._values.get(name, self._environment.get(name))
            if self._nothing or name in self._unknown or (held is None and other is None):
                return found[0]
            if other is not None and (held is None or (held == "" and ":" in how)):
                held = other
            if held is None or (OUTPUT in held and len(held.split()) == 1):
                return found[0]
            self._filled_in += len(held)
            if self._filled_in > 64 * MOST:
                return found[0]
            if not _open(held):
                taken[name] = held
            return held

        for _ in range(8):  # the innermost of ${A:-${B:-1}} first
            before, text = text, _USED.sub(value, text)
            if text == before:
                break
        return text

    def _read(self) -> None:
        self._values: dict[str, str] = {}
        self._plain: Counter[str] = Counter()
        self.reads.clear()
        self._held_back: list[int] = []
        self._assignments: set[int] = set()
        words = self._tokens
        ends, alone = _ends(words), _ends(words, lambda word: not _ASSIGNED.fullmatch(word))
        used: set[str] = set()
        depth = inside = 0
        begins, conditional, compared = True, False, False
        for at, token in enumerate(words):
            before, after = words[at - 1] if at else "\n", words[at + 1] if at + 1 < len(words) else "\n"
            if token in MARKS:
                inside = max(0, inside + (token == "(") - (token == ")"))  # a pattern of a case closes what nothing opened
                conditional = token in ("&&", "||", "|") or (conditional and (token not in ("\n", ";") or before in ("&&", "||", "|")))
                begins = token not in ("<", ">")
                continue
            compared = (compared or (begins and token == "[[")) and token != "]]"
            begins = begins and not compared
            assigned = _ASSIGNED.fullmatch(token)
            if begins and not inside and after != ")":  # which ends a pattern
                depth += (token in _OPEN) - (token in _CLOSE)
            if begins and token in ("source", ".") and after not in MARKS:
                self.reads.append(after.translate(DOLLARS))
            if begins and token in _SETTERS | _DECLARES and before not in _DECLARES:
                given = words[at + 1 : ends[at]]
                self._nothing |= any(_sets_any(token, word) for word in given)
                self._unknown |= {name for word in given if token in _SETTERS for name in _STARTS_WITH.findall(word)}
            if assigned and begins:
                self._assignments.add(at)
                plain = depth == inside == 0 and not conditional and assigned[2] == "=" and alone[at] == ends[at]
                plain = plain and (ends[at] == len(words) or words[ends[at]] in ("\n", ";"))
                self._set(assigned[1], assigned[3], plain=plain and assigned[1] not in used)
                used |= {name for name in _NAMED.findall(assigned[3]) if name != assigned[1]}
            else:
                used |= set(_NAMED.findall(token))
            if depth or conditional:
                self._held_back.append(at)
            begins = before == "function" or (begins and (token in _OPEN or token in _BEFORE or bool(assigned)))

    def _holes(self) -> Iterator[str]:
        """Of the commands that start something, and of the arrays that a script hands on."""
        handed = {name for token in self._tokens for name in _LISTED.findall(token)}
        filled: set[str] = set()
        for command in commands(self._tokens):
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
                    yield word.translate(DOLLARS)
                elif previous.startswith("--") and "=" not in previous and not is_switch(previous):
                    continue  # its value
                else:
                    found = self._filled(word, {})
                    pieces = found.split() if word[0] == "$" else [found]
                    if any(_ALONE.fullmatch(piece) or piece[0] == OUTPUT or _NAME_LEFT.match(piece) for piece in pieces if piece):
                        yield word.translate(DOLLARS)

    def _set(self, name: str, text: str, *, plain: bool) -> None:
        value = self._filled(text, {})
        plain = plain and len(value) <= MOST
        known = name not in self._values or self._values[name] == value
        if plain and known and not value.endswith(("$", QUOTED)):
            self._values[name] = value
            self._plain[name] += 1
            self._unknown |= {one for found in _USED.finditer(value) for one in found.group(1, 2) if one}  # what it was then, whatever is set later
        else:
            self._unknown.add(name)


def _open(text: str) -> bool:
    """Whether a variable is left in it."""
    return any(mark in text for mark in ("$", QUOTED, OUTPUT))


def _names(pattern: re.Pattern[str], text: str) -> list[str]:
    return [name for found in pattern.finditer(text) for name in found.groups() if name]


def _ends(words: Sequence[str], but: Callable[[str], bool] = lambda word: False) -> list[int]:
    """For every word, where the next mark stands, or the next word of which ``but`` is true."""
    found = [len(words)] * (len(words) + 1)
    for at in range(len(words) - 2, -1, -1):
        following = words[at + 1]
        found[at] = at + 1 if following in MARKS or but(following) else found[at + 1]
    return found


def _sets_any(command: str, word: str) -> bool:
    """Whether a command sets a variable whose name is not written."""
    if command in _DECLARES:
        return _open(word.partition("=")[0]) or (word[0] == "-" and "n" in word)
    return command in ("eval", "read", "printf", "mapfile", "readarray") and (_open(word) if command != "printf" else word == "-v")


def _arithmetic(script: str) -> Iterator[str]:
    """What stands in ``((...))``."""
    at = 0
    while (start := script.find("((", at)) >= 0 and (end := script.find("))", start)) >= 0:
        yield script[start + 2 : end]
        at = end + 2
