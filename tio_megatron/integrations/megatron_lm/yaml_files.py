"""``--yaml-cfg FILE``: a YAML configuration of Megatron-LM, read as the command line that says the same.

Megatron-LM core_v0.16.1 cannot start from such a file. Its check reads ``account_for_embedding_in_pipeline_split`` beside the file's two sections,
its ``TransformerConfig`` asks for the same name inside one of them, and a name that stands in both is an error; what a command line leaves out has a
default, what a file leaves out ends the run. Under the contract a file is therefore turned into arguments, and the rest is the path that a command
line takes: the same checks, defaults and words.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tio_megatron.files.strict_yaml import read_yaml
from tio_megatron.findings.messages import shown

SECTIONS = ("language_model", "model_parallel")
"""A file's names stand in these or beside them; under the contract it does not matter where."""

RENAMED = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
}
"""Fields of ``TransformerConfig`` that the command line calls otherwise."""

WORDS: dict[str, dict[Any, list[str]]] = {
    "activation_func": {"swiglu": ["--swiglu"], "squaredrelu": ["--squared-relu"], "gelu": []},
    "init_method": {"xavier_uniform": ["--init-method-xavier-uniform"]},
    "persist_layer_norm": {True: [], False: ["--no-persist-layer-norm"]},
}
"""Fields of which each value is an argument, or none."""

FOLLOWS = ("gated_linear_unit", "bias_activation_fusion", "params_dtype", "pipeline_dtype", "deallocate_pipeline_outputs", "batch_p2p_comm")
"""Fields that Megatron-LM sets itself from the rest, whatever the file says."""

_parser: argparse.ArgumentParser | None = None
"""The script's own, to which it may have added arguments."""


def remember(parser: argparse.ArgumentParser) -> None:
    """The parser by which a file will be read."""
    global _parser
    _parser = parser


def as_arguments(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """``load_yaml``: the file as arguments, before those of the command line, which go before it."""

    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        from megatron.core.transformer import TransformerConfig

        if _parser is None:
            raise ValueError(f"--yaml-cfg {yaml_path}: read before the arguments were known; pretrain_gpt.py's own order would work")
        check_text(yaml_path)
        words = arguments(plain(original(yaml_path)), _parser, {field.name: field.default for field in dataclasses.fields(TransformerConfig)}, yaml_path)
        if os.environ.get("RANK", "0") == "0":
            print(f"tio_megatron: {yaml_path} is read as: {shlex.join(words)}", flush=True)
        args, _ = _parser.parse_known_args([*words, *sys.argv[1:]])
        args.yaml_cfg = None
        return args

    return load_yaml


def check_text(path: str) -> None:
    """Refuse a file that Megatron-LM's reader, which takes the last of two values, could not read or would read as something else.

    Raises:
        ValueError: no YAML, no mapping of names, a section that is none, or a name given twice.
        OSError: the file cannot be read.
    """
    try:
        held = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"--yaml-cfg {path}: cannot be read ({' '.join(str(error).split())})") from error
    for where, part in ((path, held), *((f"{path}: {name}", held[name]) for name in SECTIONS if isinstance(held, Mapping) and held.get(name) is not None)):
        if not isinstance(part, Mapping) or not all(isinstance(name, str) for name in part):
            raise ValueError(f"--yaml-cfg {where}: names with values would work; found {shown(part)}")


def plain(found: Any) -> dict[str, Any]:
    """What ``load_yaml`` made of a file, as one dictionary without its sections.

    Raises:
        ValueError: a name stands twice with different values.
    """
    flat: dict[str, Any] = {}
    for name, value in vars(found).items():
        if name == "yaml_cfg":
            continue
        for inner, said in vars(value).items() if name in SECTIONS and isinstance(value, SimpleNamespace) else ((name, value),):
            if inner in flat and flat[inner] != said:
                raise ValueError(f"{inner} is {flat[inner]!r} and {said!r} in one file; once would work")
            flat[inner] = said
    return flat


def arguments(said: Mapping[str, Any], parser: argparse.ArgumentParser, fields: Mapping[str, Any], where: str = "the file") -> list[str]:
    """The arguments that say what a file says.

    Args:
        said: by name, as in the file: destinations of arguments, or fields of ``TransformerConfig``. ``None`` is not said.
        parser: that will read them.
        fields: defaults of ``TransformerConfig``, by name.
        where: the file, for messages.

    Raises:
        ValueError: lists every name that no argument says.
    """
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings:
            actions.setdefault(action.dest, []).append(action)
    words, wrong = [], []
    for name, value in said.items():
        if value is None or name in FOLLOWS:
            continue
        try:
            words += list(_words(name, value, actions, fields))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(f"{where} cannot be read as arguments of this script:\n  " + "\n  ".join(wrong))
    return words


def _words(name: str, value: Any, actions: Mapping[str, list[argparse.Action]], fields: Mapping[str, Any]) -> Iterator[str]:
    if name in WORDS:
        if not isinstance(value, str | bool) or value not in WORDS[name]:
            raise ValueError(f"{name}={value!r}: {' or '.join(map(repr, WORDS[name]))} would work")
        yield from WORDS[name][value]
        return
    if name.startswith("tio_"):
        raise ValueError(f"{name}={value!r}: read before any file; --{name.replace('_', '-')} on the command line would work")
    if name == "num_query_groups":
        yield "--group-query-attention"
    known = actions.get(RENAMED.get(name, name), [])
    if not known:
        if value is False or (name in fields and value == fields[name]):
            return
        what = "a field of TransformerConfig that no argument sets" if name in fields else "neither an argument nor a field of TransformerConfig"
        raise ValueError(f"{name}={value!r}: {what}; without it the file would work")
    if isinstance(value, bool):
        if value == bool(known[0].default):
            return
        for action in known:
            if action.nargs == 0 and action.const is value:
                yield action.option_strings[0]
                return
        if not any(action.nargs is None and action.type is bool for action in known):
            raise ValueError(f"{name}={value!r}: no argument says so; {not value!r}, the default, would work")
    valued = next((action for action in known if action.nargs != 0), None)
    if valued is None:
        raise ValueError(f"{name}={value!r}: a switch; true or false would work")
    if isinstance(value, list) and valued.nargs is not None:
        yield valued.option_strings[0]
        yield from map(str, value)
    else:
        said = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value  # as a pattern of layers is written, without blanks
        yield f"{valued.option_strings[0]}={said}"
