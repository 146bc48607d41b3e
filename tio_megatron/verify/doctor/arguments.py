"""Command lines, cut into options as the engine's own parser would. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from tio_megatron.files.strict_yaml import read_yaml
from tio_megatron.integrations.option_facts import Flag, options


def split(text: str, source: str) -> list[str]:
    """The words of a command line.

    Raises:
        ValueError: a quotation that does not end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{source}: cannot be split into arguments ({error})") from error


def arguments(words: Sequence[str], engine: str) -> dict[str, Any]:
    """Options by the names that the engine's parser gives them; the last of a repeated option holds. What it does not know keeps its own name.

    Args:
        words: as the shell cuts them.
        engine: ``megatron-lm`` or ``vllm``.
    """
    known, found, index = options(engine), dict[str, Any](), 0
    if engine == "vllm" and "serve" in words:
        index = words.index("serve") + 1
        if index < len(words) and not words[index].startswith("-"):
            found["model"] = words[index]
    while index < len(words):
        word, index = words[index], index + 1
        if not re.match(r"--?[A-Za-z]", word) or (engine != "vllm" and not word.startswith("--")):
            continue
        head, given, value = word.partition("=")
        flag, name = _flag(head, engine)
        if flag is None and engine == "vllm" and (short := known.flag(word[:2])) is not None and not word.startswith("--"):
            flag, name, given, value = short, short.name, "=", word[2:].removeprefix("=")  # a letter may have its value behind it
        following = _values(words[index:], -1 if flag is not None and flag.words == -1 else 1)
        if flag is not None and flag.words == 0:
            switched = following[:1] and following[0].lower() in ("true", "false")  # as YAML is written on a command line
            found[name] = value_of(value or following[0]) if given or switched else flag.value
            continue
        more = [value] if given else following
        index += 0 if given else len(following)
        if flag is None and not more and name.startswith("no_"):
            name, more = name[3:], ["false"]
        found[name] = True if not more else value_of(more[0]) if len(more) == 1 else [value_of(one) for one in more]
    return found


def _flag(head: str, engine: str) -> tuple[Flag | None, str]:
    """What ``head`` spells, and the option's name: vLLM takes a part of a mapping behind a point."""
    first, point, part = head.partition(".")
    flag = options(engine).flag(first if engine == "vllm" else head)
    if flag is None:
        return None, head.lstrip("-").replace("-", "_")
    return (Flag(flag.name, 1), f"{flag.name}.{part}") if point else (flag, flag.name)


def _values(words: Sequence[str], most: int) -> list[str]:
    """The words that follow an option up to the next one; a negative number is a value."""
    found: list[str] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word) or len(found) == most:
            break
        found.append(word)
    return found


def value_of(text: str) -> Any:
    """A number, truth value or list as YAML reads it; else the text. YAML takes 1e-6, which has no point, for text."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | list) or value is None else text
