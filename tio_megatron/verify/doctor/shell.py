"""Variables of a launch script, as far as it says them plainly. Nothing is run: what hangs on a condition, a command or a caller stays as it is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tio_megatron.verify.doctor.shell_words import BLANK, DOLLARS, MARKS, OUTPUT, QUOTED, apart, literal, tokens

ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_USED = re.compile(r"[$\x02](?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?-)([^{}$\x02`]*))?\})")
NAMED = re.compile(r"[$\x02]\{?[!#]?([A-Za-z_]\w*)")
_SET_SOMEHOW = re.compile(r"(?<![\w.$\x02/-])([A-Za-z_]\w*)(?:\[[^\]\n]{0,200}\])?\+?=(?!=)")
_SET_BY_USE = re.compile(r"[$\x02]\{([A-Za-z_]\w*):?=")
_COUNTED = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]\n]{0,200}\])?\s*(?:\+\+|--|[-+*/%&|^<>]*=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SAID = re.compile(r"\becho\b[^\n]*|\bprintf\b(?! +-v)[^\n]*")
"""What is printed for people."""
OPEN, _CLOSE = frozenset("if for while until case select {".split()), frozenset("fi done esac }".split())
BEFORE = frozenset("then do else elif ! time command builtin exec nohup export readonly declare local typeset".split())
"""Words behind which a command, and so an assignment, can begin."""
_DECLARES = frozenset("export readonly declare local typeset".split())
_SETTERS = frozenset("read unset mapfile readarray getopts for select let printf eval".split())
_STARTS_WITH = re.compile(r"^[A-Za-z_]\w*")
MOST = 1 << 16
"""Characters that a variable may hold, and a 64th of those that are put in altogether: a script may double a string again and again."""
_COUNTS = re.compile(r"(?:TIO|VLLM|VERL|NCCL|HCCL|LCCL|NVTE|CUBLAS|OMP|MKL|OPENBLAS|ASCEND|CUDA|TORCH|PYTORCH|DNNL|ONEDNN)_")
_HARMLESS = frozenset("set_env.sh setvars.sh activate .bashrc .bash_profile profile conda.sh setenv.bash bashrc".split())
"""Files that set paths: of CANN, oneAPI, virtual environments and shells."""


class Variables:
    """What a script sets, and what it leaves to the environment.

    A variable is known if every place that gives it a value is an assignment on its own, outside of any condition, loop, function and subshell. Between two
    of them it has the value of the first; where a function, a loop or a condition uses it, it is known if they all give it one value, and none comes later.

    Args:
        script: its text.
        environment: of the process that would run it.
        knows_nothing: no variable is put in.
    """

    def __init__(self, script: str, environment: Mapping[str, str], *, knows_nothing: bool = False) -> None:
        self.environment = environment
        self._filled_in = 0
        self.taken: dict[str, str] = {}
        """Variables that :meth:`fill` has put in, in the order of their use."""
        self.reads: list[str] = []
        """Other files that the script reads. Any but those that set paths may set every variable: none is known then."""
        outer, bodies = apart(script)
        self.outputs: list[str] = []
        outer = literal(outer, self.outputs)
        self.tokens = list(tokens(outer))
        self.bodies = bodies
        whole = "\n".join([outer, *(body.text for body in bodies)])
        somehow = Counter([*_names(_SET_SOMEHOW, _SAID.sub("", whole)), *_names(_SET_BY_USE, whole)])
        self._unknown = {name for part in _arithmetic(script) for name in _names(_COUNTED, part)}
        self.knows_nothing = knows_nothing
        self._many: set[str] = set()
        self._read()
        self.knows_nothing |= any(name.rpartition("/")[2] not in _HARMLESS for name in self.reads)
        self._unknown |= {name for name, times in somehow.items() if times > self._plain[name] + self._arguments[name]}
        self._read()  # again, so that nothing rests on what turned out to be unknown
        self.sets = self._sets()
        """Variables of the environment that count for a run and that the script sets, with what is known of their values."""
        self.holes: list[str] = []
        """Words of a run that are not known and may hold options; whoever reads the :meth:`parts` knows which run."""

    def _sets(self) -> dict[str, str]:
        found = (ASSIGNED.fullmatch(self.tokens[at]) for at in sorted(self.assignments))
        return {one[1]: self._filled(one[3], {}).translate(DOLLARS) for one in found if one and _COUNTS.match(one[1])}

    def at(self, place: int) -> list[str]:
        """The word at a place of :attr:`tokens` as the shell would hand it on there."""
        words, taken = self._fills.get(place, ([self.tokens[place].translate(DOLLARS)], {}))
        self.taken |= taken
        return words

    def fill(self, word: str) -> list[str]:
        """A word as the shell would hand it on at the script's end: several where a variable alone holds several. What is not known stays.

        >>> Variables("TP=${TP:-4}; both=$((TP * 2)); more='--pp 2'", {}).fill("a.b=${TP}")
        ['a.b=4']
        >>> Variables("if x; then TP=2; fi; more='--pp 2 --x'", {}).fill("$TP"), Variables("more='--pp 2 --x'", {}).fill("$more")
        (['$TP'], ['--pp', '2', '--x'])
        """
        return self._split(word, self._filled(word, self.taken))

    def _split(self, word: str, filled: str) -> list[str]:
        words = filled.translate({ord(BLANK): " "}).split() if filled != word and word[0] == "$" and _USED.fullmatch(word) else [filled]
        return [one.translate(DOLLARS) for one in words]

    def _filled(self, text: str, taken: dict[str, str], *, held: bool = False) -> str:
        held_back = held

        def value(found: re.Match[str]) -> str:
            name, how, other = found[1] or found[2], found[3] or "", found[4]
            held = None if name in self._unknown else self._values.get(name, self.environment.get(name))
            if self.knows_nothing or name in self._unknown or (held_back and name in self._many) or (held is None and other is None):
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
        self._arguments: Counter[str] = Counter()
        self.reads.clear()
        self.assignments: set[int] = set()
        self._fills: dict[int, tuple[list[str], dict[str, str]]] = {}
        self.held: set[int] = set()
        """Places of :attr:`tokens` in a condition, a loop, a function or a subshell."""
        words = self.tokens
        ends, alone = _ends(words), _ends(words, lambda word: not ASSIGNED.fullmatch(word))
        used: set[str] = set()
        depth = inside = 0
        begins, conditional, compared, array, head = True, False, False, False, ""
        for at, token in enumerate(words):
            before, after = words[at - 1] if at else "\n", words[at + 1] if at + 1 < len(words) else "\n"
            if token in MARKS:
                array = (array or (token == "(" and not inside and before[-1] == "=")) and not (token == ")" and inside == 1)
                inside = max(0, inside + (token == "(") - (token == ")"))  # a pattern of a case closes what nothing opened
                conditional = token in ("&&", "||", "|") or (conditional and (token not in ("\n", ";") or before in ("&&", "||", "|")))
                begins = token not in ("<", ">")
                head = "" if begins else head
                continue
            compared = (compared or (begins and token == "[[")) and token != "]]"
            begins = begins and not compared
            assigned = ASSIGNED.fullmatch(token)
            if begins and not assigned and token not in BEFORE | OPEN and not token.isdigit() and token[0] != "-":
                head = token
                first = self._filled(token, {}).split()[:1]
                self.knows_nothing |= first != [token] and bool({*first} & (_SETTERS | _DECLARES | {".", "source"}))
            if assigned and not begins and head not in ("", "eval", "trap", "let"):
                self._arguments[assigned[1]] += 1  # another program's word
            if begins and not inside and after != ")":  # which ends a pattern
                depth += (token in OPEN) - (token in _CLOSE)
            if begins and token in ("source", "."):
                self.reads.append(after.translate(DOLLARS))
            if begins and token in _SETTERS | _DECLARES and before not in _DECLARES:
                given = words[at + 1 : ends[at]]
                self.knows_nothing |= any(_sets_any(token, word) for word in given)
                self._unknown |= {name for word in given if token in _SETTERS for name in _STARTS_WITH.findall(word)}
            if assigned and begins:
                self.assignments.add(at)
                plain = depth == inside == 0 and not conditional and alone[at] == ends[at] and after != "("
                plain = plain and (ends[at] == len(words) or words[ends[at]] in ("\n", ";"))
                self._set(assigned[1], assigned[3], plain=plain and assigned[1] not in used, more=assigned[2] == "+=")
            if depth or conditional or (inside and not array):
                self.held.add(at)
                used |= set(NAMED.findall(token))
            if _open(token) and at not in self.assignments:
                taken: dict[str, str] = {}
                self._fills[at] = self._split(token, self._filled(token, taken, held=at in self.held)), taken
            begins = before == "function" or (begins and (token in OPEN or token in BEFORE or bool(assigned)))
            self.knows_nothing |= depth < 0  # not understood
        self.knows_nothing |= depth != 0

    def _set(self, name: str, text: str, *, plain: bool, more: bool) -> None:
        value = self._filled(text, {})
        if more:
            plain = plain and name in self._values
            value = self._values.get(name, "") + value
        if plain and len(value) <= MOST and not value.endswith(("$", QUOTED)):
            if self._values.get(name, value) != value:
                self._many.add(name)
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
