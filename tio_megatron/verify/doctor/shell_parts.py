"""The commands and arrays of a launch script that hold words of a run, filled in; and what in them is not followed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tio_megatron.contract.messages import cut
from tio_megatron.verify.doctor.megatron_switches import is_switch
from tio_megatron.verify.doctor.shell import ASSIGNED, BEFORE, NAMED, OPEN, Variables
from tio_megatron.verify.doctor.shell_words import DOLLARS, MARKS, commands

_STARTS = re.compile(r"(?:^|/)(?:torchrun|vllm|deepspeed|python[\d.]*)$|\.py$|^(?:verl|torch|vllm)\.")
"""A word by which a command is a run."""
_ALONE = re.compile(r"[$\x02](?:[A-Za-z_]\w*|\{[A-Za-z_]\w*[^\[\]]*\})")
_HOLE = re.compile(r"\$|-{0,2}[\w-]*\$|@|\{|\+{0,2}[^=\s]*\$[^=\s]*=")
"""A word that may turn into any option: it begins with what is not known, or its name holds that."""
_SAYS = re.compile(r"(?:\+{0,2}|--)[\w./@-]+=")
_RUNS = re.compile(r"(?:^|\s)--[A-Za-z]|\btorchrun\b|\bvllm serve\b|\bactor_rollout_ref\.")
"""A command, or options, in one string."""
_RUN = re.compile(r"\btorchrun\b|\bvllm serve\b|\bactor_rollout_ref\.|\bpretrain_\w+\.py\b")
_CALLERS = re.compile(r"[$\x02](?:[@*]|\{[@*]\})")
"""A caller's arguments, all of them."""
_ARRAY = re.compile(r"([A-Za-z_]\w*)\+?=")
_OTHERS = frozenset(
    "ray curl wget ssh-keygen scp rsync ls grep tar pip pip3 conda git nvidia-smi npu-smi kubectl aws sed awk cat tee wait kill sleep mkdir rm cp mv date hf "
    "huggingface-cli modelscope wandb set trap echo printf [ [[ test cd ulimit shopt module".split()
)
"""Programs whose options are none of a run's."""
MOST_WORDS = 1 << 18
"""That all commands of a script hold together; a few lines can hand a long array on again and again."""
_LISTED = re.compile(r"[$\x02]\{([A-Za-z_]\w*)\[[@*]\]\}")


@dataclass(frozen=True)
class Part:
    """One command or array of a script: its ``words``, filled in; ``holes``, those of its words that may turn into options which are not known; whether it
    ``runs`` something by its looks, or is handed on; ``strings``, those that hold a command or options in one string."""

    words: tuple[str, ...]
    holes: tuple[str, ...] = ()
    runs: bool = True
    strings: tuple[str, ...] = ()


def parts(variables: Variables) -> list[Part]:
    """Of a script, in its order. An array that is given its words once, outside of any condition, stands where a command hands it on; of any other that is
    handed on each piece is a part, and one that nobody hands on is none."""
    script = _Script(variables)
    found = list(script.parts())
    for body in variables.bodies:
        found += parts(Variables(body.text, variables.environment, knows_nothing=not body.quoted))  # else this script fills it in before another reads it
    return [*found, *(Part((), (), False, (f"$({cut(output, 60)})",)) for output in variables.outputs if _RUN.search(output))]


class _Script:
    def __init__(self, variables: Variables) -> None:
        self.variables, self.tokens = variables, variables.tokens
        self.handed = {name for token in self.tokens for name in _LISTED.findall(token)}
        given = (ASSIGNED.fullmatch(self.tokens[at]) for at in variables.assignments)
        self.runs_of = {one[1] for one in given if one and _RUNS.search(one[3])}
        """Variables that are somewhere given a whole command, or options."""
        self.count = 0
        self.arrays: dict[str, list[list[int]]] = {}
        self.commands: list[list[int]] = []
        for places in commands(self.tokens):
            words = [self.tokens[at] for at in places]
            opened = next((at for at, word in enumerate(words[:-1]) if words[at + 1] == "(" and _ARRAY.fullmatch(word)), None)
            if opened is None:
                self.commands.append(places)
                continue
            self.arrays.setdefault(words[opened].rstrip("+="), []).append(places[opened:])

    def parts(self) -> Iterator[Part]:
        for name, pieces in self.arrays.items():
            if name in self.handed and not self._plain(name):
                yield from (self._read(places[2:], runs=True) for places in pieces)
        for places in self.commands:
            words = [self.tokens[at] for at in places]
            start = next((at for at, place in enumerate(places) if place not in self.variables.assignments and words[at] not in BEFORE | OPEN), len(words))
            if words[start : start + 1] == ["ray"] and "--" in words:
                start = words.index("--") + 1  # ray job submit ... -- python3 ...
            if start < len(words) and not self._of_another(words[start:]):
                yield self._read(places[start:], runs=any(_STARTS.search(word) for word in words[start:]), command=True)

    def _plain(self, name: str) -> bool:
        pieces = self.arrays.get(name, [])
        return len(pieces) == 1 and not set(pieces[0]) & self.variables.held and not self.tokens[pieces[0][0]].endswith("+=")

    def _of_another(self, words: Sequence[str]) -> bool:
        program = self.variables.fill(words[0])[:1]
        named = program[0].rpartition("/")[2] if program else ""
        return named in _OTHERS or (named == "vllm" and len(words) > 1 and words[1] not in ("serve", "--help") and words[1][0].isalpha())

    def _read(self, places: Sequence[int], *, runs: bool, command: bool = False, depth: int = 0) -> Part:
        words: list[str] = []
        holes: list[str] = []
        strings: list[str] = []
        self.count += len(places)
        if self.count > MOST_WORDS:
            raise ValueError(f"its commands hold more than {MOST_WORDS} words")
        for number, place in enumerate(places):
            word, before = self.tokens[place], self.tokens[place - 1] if place else "\n"
            if word == "(" and before in ("<", ">"):
                holes.append(f"{before}(...)")
            to_file = before in ("<", ">") or (before == "&" and place > 1 and self.tokens[place - 2] in ("<", ">"))
            if word in MARKS or word in ("{", "}") or to_file or _CALLERS.fullmatch(word):
                continue
            if listed := _LISTED.fullmatch(word):
                if listed[1] not in self.arrays:
                    holes.append(word.translate(DOLLARS))
                elif self._plain(listed[1]) and depth < 4:
                    array = self._read(self.arrays[listed[1]][0][2:], runs=True, depth=depth + 1)
                    words += array.words
                    holes += array.holes
                    strings += array.strings
                continue
            pieces = self.variables.at(place)
            previous = words[-1] if words else ""
            words += pieces
            if _ALONE.fullmatch(word) and len(pieces) == 1 and "$" in pieces[0] and (name := NAMED.match(word)) and name[1] in self.runs_of:
                strings.append(word.translate(DOLLARS))
            elif command and (number == 0 or previous == "serve" or re.fullmatch(r"python[\d.]*", previous.rpartition("/")[2])):
                continue  # the program, a model, a script
            elif any((_RUN if _SAYS.match(piece) else _RUNS).search(piece) and len(piece.split()) > 1 for piece in pieces):
                strings.append(word.translate(DOLLARS))
            elif any(not _takes_value(one) and _HOLE.match(piece) for one, piece in itertools.pairwise([previous, *pieces])):
                holes.append(word.translate(DOLLARS))
        return Part(tuple(words), tuple(dict.fromkeys(holes)), runs, tuple(dict.fromkeys(strings)))


def _takes_value(word: str) -> bool:
    """Whether the word behind an option is its value, as far as its looks say."""
    return "=" not in word and ((word.startswith("--") and not is_switch(word)) or re.fullmatch(r"-[A-Za-z]", word) is not None)
