"""Names, spellings and defaults of the engines' options: one generated file per release in ``facts/``, and the command that makes it from the engine itself.

The files are read where no engine is installed, and quickly where it is; a test compares them with the engines that are there.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tio_megatron.files.strict_json import read_json
from tio_megatron.files.strict_yaml import read_yaml
from tio_megatron.findings.finding import name_of

FOLDER = Path(__file__).parent / "facts"
FILES = {
    "megatron-lm": "megatron_lm-core_v0.16.1.json",
    "megatron-core": "megatron_core-0.16.1.json",
    "vllm": "vllm-0.32.0.json",
    "verl": "verl-0.9.1.json",
}
RELEASE = {"megatron-lm": "Megatron-LM core_v0.16.1", "megatron-core": "megatron-core 0.16.1", "vllm": "vLLM 0.32.0", "verl": "verl 0.9.1"}


@dataclass(frozen=True)
class Flag:
    """What a word of the command line sets: ``name`` to ``value``, or to the words that follow (``words``: 0, 1, or -1 for any number)."""

    name: str
    words: int
    value: Any = None


@dataclass(frozen=True)
class Options:
    """An engine's: defaults by name, and its command line's words.

    ``from_checkpoint``: names that a checkpoint's arguments supply where it is asked for, ``where_unset``: those that it supplies where nothing else does.
    """

    defaults: dict[str, Any]
    flags: dict[str, Flag]
    from_checkpoint: frozenset[str]
    where_unset: frozenset[str]

    def flag(self, word: str) -> Flag | None:
        """The option that ``word`` spells; ``-`` and ``_`` are the same behind the first two letters.

        >>> options("megatron-lm").flag("--no-rope-fusion")
        Flag(name='apply_rope_fusion', words=0, value=False)
        """
        return self.flags.get(word) or self.flags.get(word[:2] + word[2:].replace("_", "-"))

    def spelled(self, name: str, value: Any) -> str | None:
        """The words that set ``name`` to ``value``; None where there are none."""
        for word, flag in self.flags.items():
            if flag.name == name and word.startswith("--") and (flag.words != 0 or flag.value == value):
                return word if flag.words == 0 else f"{word} {value}"
        return None


@cache
def options(engine: str) -> Options:
    """Of ``engine``, as :data:`FILES` names it."""
    held = read_json((FOLDER / FILES[engine]).read_text(encoding="utf-8"))
    flags = {word: Flag(name, one["words"], one.get("value")) for name, its in held.get("flags", {}).items() for one in its for word in one["spelled"]}
    return Options(held["defaults"], flags, *(frozenset(held.get(name, ())) for name in ("from_checkpoint", "from_checkpoint_where_unset")))


def made(engine: str, source: str | None = None) -> dict[str, Any]:
    """The content of a file, from the engine: installed here, or (Megatron-LM, verl) the folder of its sources."""
    makers: dict[str, Any] = {"megatron-lm": _megatron_lm, "megatron-core": _megatron_core, "vllm": _vllm, "verl": _verl}
    where = f" {'DIR' if source else ''}".rstrip()
    return {"made_by": f"python -m tio_megatron.integrations.option_facts {engine}{where}", "release": RELEASE[engine], **makers[engine](source)}


def _megatron_lm(source: str) -> dict[str, Any]:
    import megatron

    sys.modules.setdefault("six", types.SimpleNamespace(text_type=str, PY2=False, PY3=True))  # type: ignore[arg-type]  # its tokenizers import it
    megatron.__path__ = [str(Path(source) / "megatron")]
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve"))
    tree = ast.parse((Path(source) / "megatron/training/checkpointing.py").read_text(encoding="utf-8"))
    load = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "load_args_from_checkpoint")
    calls = [node for node in ast.walk(load) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_set_arg"]
    found = _of_parser(parser)
    names = {ast.literal_eval(call.args[0]): any(word.arg == "force" and ast.literal_eval(word.value) for word in call.keywords) for call in calls}
    own = {name: forced for name, forced in names.items() if name in found["defaults"] and not name.endswith("parallel_size")}
    found["from_checkpoint"] = sorted(name for name, forced in own.items() if forced)
    found["from_checkpoint_where_unset"] = sorted(name for name, forced in own.items() if not forced and found["defaults"][name] is None)
    return found


def _megatron_core(_: str | None) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    found: dict[str, Any] = {}
    for kind in (OptimizerConfig, DistributedDataParallelConfig, TransformerConfig):  # the model's own defaults last
        found |= {field.name: None if field.default is dataclasses.MISSING else _plain(field.default) for field in dataclasses.fields(kind)}
    return {"defaults": dict(sorted(found.items()))}


def _vllm(_: str | None) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = _of_parser(make_arg_parser(FlexibleArgumentParser()))
    found["flags"]["optimization_level"].append({"spelled": ["-O"], "words": 1})  # its parser rewrites -O3 and -O 3 before it reads them
    fields = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    found["defaults"] |= {name: _plain(value) for name, value in fields.items() if value is not dataclasses.MISSING and not callable(value)}
    return found


def _verl(source: str) -> dict[str, Any]:
    path = Path(source) / "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
    tree = read_yaml(path.read_text(encoding="utf-8"))
    actor, laid = tree["actor_rollout_ref"]["actor"], "override_transformer_config"
    trainer = {**actor["megatron"][laid], **actor["megatron"], **{name: actor[name] for name in ("strategy",)}, **tree["trainer"]}
    return {"defaults": {"trainer": _scalars(trainer), "rollout": _scalars(tree["actor_rollout_ref"]["rollout"])}}


def _scalars(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(tree.items()) if not isinstance(value, dict | list) and not str(value).startswith(("$", "???"))}


def _of_parser(parser: argparse.ArgumentParser) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    flags: dict[str, list[dict[str, Any]]] = {}
    for action in parser._actions:
        if action.dest == "help" or not action.option_strings:
            continue
        defaults[action.dest] = _plain(None if action.default is argparse.SUPPRESS else action.default)
        flags.setdefault(action.dest, []).extend(_spelled(action))
    return {"defaults": dict(sorted(defaults.items())), "flags": dict(sorted(flags.items()))}


def _spelled(action: argparse.Action) -> Iterator[dict[str, Any]]:
    words = list(action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction):
        yield {"spelled": [word for word in words if not word.startswith("--no-")], "words": 0, "value": True}
        yield {"spelled": [word for word in words if word.startswith("--no-")], "words": 0, "value": False}
    elif action.nargs == 0:
        yield {"spelled": words, "words": 0, "value": _plain(action.const)}
    else:
        yield {"spelled": words, "words": -1 if action.nargs in ("*", "+") else 1}


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | float) or value is None:
        return getattr(value, "value", value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return getattr(value, "name", None) or name_of(value)


def written(content: dict[str, Any]) -> str:
    """The text of a file: one option a line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            inside = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inside}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{" + ",\n".join(lines) + "}\n"


if __name__ == "__main__":
    engine, folder = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else None)
    (FOLDER / FILES[engine]).write_text(written(made(engine, folder)), encoding="utf-8")
