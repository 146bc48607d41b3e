"""Generated tasks whose answers can be checked: a prompt, its right answer, and a grade between 0 and 1 for any other.

A task is a function of (name, seed, step, number) alone, so every run, layout and restart is asked the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

LETTERS = "abcdefgh"
"""With the blank in front, each is one token of a tokenizer trained on text."""
WARM_UP = -1
"""The step whose tasks, as many as are asked for, are shown with their answers before reinforcement learning starts; no step of a run has it."""


@dataclass(frozen=True)
class Task:
    """What is asked, and the right answer, as texts."""

    prompt: str
    answer: str


def _sort(source: random.Random) -> Task:
    letters = source.sample(LETTERS, source.randint(3, 5))
    return Task(f"sort: {' '.join(letters)} =", "".join(f" {letter}" for letter in sorted(letters)))


def _reverse(source: random.Random) -> Task:
    letters = source.sample(LETTERS, source.randint(3, 5))
    return Task(f"reverse: {' '.join(letters)} =", "".join(f" {letter}" for letter in reversed(letters)))


def _add(source: random.Random) -> Task:
    a, b = source.randint(0, 49), source.randint(0, 49)
    return Task(f"add: {' '.join(str(a))} + {' '.join(str(b))} =", "".join(f" {digit}" for digit in str(a + b)))


TASKS: dict[str, Callable[[random.Random], Task]] = {"sort": _sort, "reverse": _reverse, "add": _add}
"""By name: letters in the order of the alphabet, letters from last to first, the sum of two numbers, digit by digit."""


def make(name: str, seed: int, step: int, count: int) -> list[Task]:
    """The first ``count`` tasks of a step.

    >>> make("sort", 1, 0, 1)
    [Task(prompt='sort: g f d b =', answer=' b d f g')]
    """
    return [TASKS[name](random.Random(_number(name, seed, step, i))) for i in range(count)]


def grade(task: Task, response: str) -> float:
    """The share of places that are right: words of the response that stand where the answer has them, of the longer one's length.

    >>> task = Task("sort: c a b =", " a b c")
    >>> grade(task, " a b c"), grade(task, " a c b"), grade(task, " a b c d"), grade(task, "")
    (1.0, 0.3333333333333333, 0.75, 0.0)
    """
    right, given = task.answer.split(), response.split()
    return sum(a == b for a, b in zip(right, given, strict=False)) / max(len(right), len(given))


def sampling_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of one sample's random numbers. It knows nothing of the batch, the layout or the engine, so neither do the tokens.

    >>> sampling_seed(1, 2, 3, 4) == sampling_seed(1, 2, 3, 4) != sampling_seed(1, 2, 4, 3)
    True
    """
    return _number("sample", seed, step, prompt, sample)


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1
