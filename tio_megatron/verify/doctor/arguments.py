"""Command lines and launch scripts, cut into options. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from tio_megatron.contract.strict_yaml import read_yaml
from tio_megatron.verify.doctor.megatron_switches import is_switch

LISTS = ("cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "recompute_modules", "moe_layer_freq", "window_size")
"""Arguments that take several words."""


def split(text: str, source: str) -> list[str]:
    """The words of a command line or of a script without comments (:func:`.shell_words.literal`).

    Raises:
        ValueError: a quotation that does not end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{source}: cannot be split into arguments ({error})") from error


def arguments(words: Sequence[str], short: Mapping[str, str] = MappingProxyType({}), *, script: bool = False) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--flag``; of a script, everything that looks so. The last of a repeated name holds, as in argparse.

    Args:
        words: as the shell cuts them.
        short: options with one dash, by what they are short for. Without any, words with one dash are left alone.
        script: other programs are called too: their words with one dash are no options, and those in front of ``vllm`` are other programs'.
    """
    found: dict[str, Any] = {}
    begin = next((i for i, word in enumerate(words) if "vllm" in word and word[0] != "-" and (i == 0 or not words[i - 1].startswith("--"))), 0)
    for index, word in enumerate(words):
        if not re.match(r"--[A-Za-z]", word):
            long = _long(word, short) if index >= begin else None
            if long is None and (script or not short or index < begin or not re.match(r"-[A-Za-z]", word)):
                continue
            word = long or f"--{word[1:]}"
        name, given, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "-"
        if not given and not following.startswith("-") and not (is_switch(word) and following.lower() not in ("true", "false")):
            value, given = following, "="
        name = name.replace("-", "_")
        if name in LISTS:
            more = [value] if given else []
            for further in words[index + 2 :] if given == "=" and "=" not in word else ():
                if further.startswith("-"):
                    break
                more.append(further)
            found[name] = value_of(more[0]) if len(more) == 1 else [value_of(one) for one in more]
        elif not given and name.startswith("no_"):
            found[name[3:]] = False
        else:
            found[name] = value_of(value) if given else True
    return found


def _long(word: str, short: Mapping[str, str]) -> str | None:
    """``-pp=2`` as ``--pipeline_parallel_size=2``, and so on; None for what is short for nothing.

    >>> [_long(word, {"pp": "pipeline_parallel_size", "O": "optimization_level", "cc": "compilation_config"}) for word in ("-pp", "-O3", "-cc.mode=3", "-x")]
    ['--pipeline_parallel_size', '--optimization_level=3', '--compilation_config.mode=3', None]
    """
    parts = re.fullmatch(r"-([A-Za-z]+)(.*)", word, re.DOTALL)
    if parts is None:
        return None
    if parts[1] in short and re.match(r"[=.]|$", parts[2]):
        return f"--{short[parts[1]]}{parts[2]}"
    if word[1] in short and len(word) > 2:  # a letter may have its value behind it
        return f"--{short[word[1]]}={word[2:].removeprefix('=')}"
    return None


def value_of(text: str) -> Any:
    """A number, truth value or list as YAML reads it; else the text. YAML takes 1e-6, which has no point, for text."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | list) or value is None else text
