"""What people already have, read as flat settings: command lines, YAML and JSON of Megatron-LM, vLLM and verl.

Names lose their dashes and their place: ``--tensor-model-parallel-size 4``, ``model_parallel: {tensor_model_parallel_size: 4}`` and verl's
``actor_rollout_ref.actor.megatron.tensor_model_parallel_size`` all say ``tensor_model_parallel_size`` = 4. Nothing is run or imported. Sizes that
nobody writes are those that the reader of the configuration takes (:mod:`tio_megatron.integrations.option_facts`).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tio_megatron.contract.words import RolloutLayout, TrainerLayout
from tio_megatron.files.strict_json import read_json
from tio_megatron.files.strict_yaml import read_yaml
from tio_megatron.findings.messages import cut
from tio_megatron.integrations.option_facts import options
from tio_megatron.integrations.vllm import refused_options
from tio_megatron.verify.doctor import running
from tio_megatron.verify.doctor.arguments import arguments, split, value_of
from tio_megatron.verify.doctor.running import Kind, Running

Side = Literal["trainer", "rollout"]
VERL: dict[Side, tuple[tuple[str, ...], ...]] = {
    "trainer": (("actor_rollout_ref", "actor", "megatron"), ("actor_rollout_ref", "actor"), ("trainer",)),
    "rollout": (("actor_rollout_ref", "rollout"),),
}
"""Where verl keeps each side's settings; ``trainer`` holds the numbers of nodes and cards."""
VERL_ELSEWHERE = (
    "val_kwargs",
    "agent",
    "trace",
    "checkpoint_engine",
    "profiler",
    "multi_turn",
    "prometheus",
    "sglang",
    "trtllm",
    "optim",
    "fsdp_config",
    "checkpoint",
)
"""Parts of them that say nothing about the scored tokens, with names that do elsewhere."""
OPTIMIZERS = frozenset("optimizer use_precision_aware_optimizer optimizer_cpu_offload use_torch_optimizer_for_cpu_offload".split())
"""Of ``optim``, what decides how an update is computed."""
VERL_OVERRIDE = re.compile(r"\+{0,2}((?:actor_rollout_ref|trainer|data|algorithm)(?:\.[A-Za-z_][\w-]*)*)=(.*)", re.DOTALL)
"""How a verl launch script writes a setting."""
_GROUP = re.compile(r"[+~]*\w+(?:/\w+)+(?:@[\w.]+)?=|[+~]*\w+@[\w.]+=")
"""How one of Hydra's groups is given another choice."""
_CONFIG = re.compile(r"(--config-name|--config-path|--config-dir|-cn|-cp|-cd)(?:=(.*))?", re.DOTALL)
_VERLS_OWN = frozenset("ppo_trainer ppo_trainer.yaml ppo_megatron_trainer ppo_megatron_trainer.yaml config".split())
WHOLE = frozenset({*refused_options.UNJUDGED, "hf_overrides", "override_generation_config", "speculative_config", "kv_transfer_config"})
"""Options of vLLM whose value is a mapping of its own: what is in it is no option."""
MOST_BYTES = 4 << 20
DEEPEST = 64

TRAINER_NAMES = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
ROLLOUT_NAMES = {"tp": "tensor_parallel_size", "ep": "enable_expert_parallel"}
AS_WRITTEN = frozenset({"model", "model_path", "tokenizer", "load", "served_model_name", "tio_contract", "additional_config"})
"""Looked at with their variables (:mod:`.sources`, :mod:`.held`), or by nobody."""
DECIDE = ("sequence_parallel", "moe_token_dispatcher_type")
"""What decides a layout beside its sizes."""
ALIASES = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "expert_parallel_size": "expert_parallel_size",
    "tp": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
}
"""On the rollout side: verl and vLLM's short option name the same size."""


@dataclass(frozen=True)
class Configured:
    """One side as somebody wrote it: its layout, and every setting found (empty when the layout was given in words)."""

    layout: TrainerLayout | RolloutLayout
    settings: Mapping[str, Any]
    kind: Kind = "words"
    holes: tuple[str, ...] = ()
    """Words of the command that may hold any option."""

    @property
    def running(self) -> Running:
        """With the defaults of everything that is not written."""
        side = running.rollout if isinstance(self.layout, RolloutLayout) else running.trainer
        left = {name: value for name, value in self.settings.items() if isinstance(value, str) and "$" in value and name.partition(".")[0] not in AS_WRITTEN}
        return side(self.kind, {name: value for name, value in self.settings.items() if name not in left}, left)


def trainer(source: str) -> Configured:
    """A trainer's layout from words (``tp2+ep2``), Megatron arguments, or a file (YAML or JSON of arguments, a verl config).

    Raises:
        ValueError: cannot be read, a setting has two values, or the sizes do not fit each other.
    """
    return _naming(source, _trainer)


def _trainer(source: str) -> Configured:
    settings, kind, holes = _read(source, "trainer")
    if settings is None:
        return Configured(TrainerLayout.parse(source), {})
    strategy = settings.get("strategy", "megatron") if kind == "verl" else "megatron"
    if strategy != "megatron":
        raise ValueError(f"{source}: the actor's strategy is {strategy!r}; only megatron has layers here (model_engine=megatron)")
    if kind == "verl":
        verls = {**options("verl").defaults["trainer"], **running.VERL_MAKES}
        settings = {**{name: verls[name] for name in (*TRAINER_NAMES.values(), "nnodes", "n_gpus_per_node", *DECIDE)}, **settings}
    sizes = {name: _whole(settings, option) for name, option in TRAINER_NAMES.items()}
    if not any(sizes.values()) and "num_layers" not in settings:
        raise ValueError(f"{source}: none of {', '.join(TRAINER_NAMES.values())} is set; is it a trainer's configuration? (words work too: tp2+ep2)")
    for name in DECIDE:
        _known(name, settings.get(name), "it out", settings)
    tp, pp, cp = sizes["tp"] or 1, sizes["pp"] or 1, sizes["cp"] or 1
    world = _world(settings)
    if world is not None and world % (tp * pp * cp):
        raise ValueError(f"{source}: {world} ranks do not divide by tp {tp} times pp {pp} times cp {cp}")
    layout = TrainerLayout.of(
        tp=tp,
        ep=sizes["ep"] or 1,
        etp=sizes["etp"] or tp,  # Megatron's default, unlike that of the words
        pp=pp,
        cp=cp,
        sp=bool(settings.get("sequence_parallel")) and tp > 1,
        dp=None if world is None else world // (tp * pp * cp),
        dispatcher=str(settings.get("moe_token_dispatcher_type", "allgather")),
    )
    return Configured(layout, settings, kind, holes)


def rollout(source: str) -> Configured:
    """A rollout engine's layout from words (``tp2+ep``), vLLM arguments, or a file (YAML or JSON of arguments, a verl config).

    Raises:
        ValueError: as :func:`trainer`.
    """
    return _naming(source, _rollout)


def _naming(source: str, read: Callable[[str], Configured]) -> Configured:
    """Errors name the file, and stay short whatever it holds."""
    try:
        return read(source)
    except (ValueError, RecursionError) as error:
        said = str(error)
        where = f"{source}: " if os.path.isfile(source) and source not in said else ""
        raise ValueError(f"{where}{cut(said, 1000)}") from error


def _rollout(source: str) -> Configured:
    settings, kind, holes = _read(source, "rollout")
    if settings is None:
        return Configured(RolloutLayout.parse(source), {})
    if kind == "verl":
        settings.setdefault("tensor_model_parallel_size", options("verl").defaults["rollout"]["tensor_model_parallel_size"])
    for theirs, vllms in ALIASES.items():
        if theirs in settings and vllms not in settings:
            settings[vllms] = settings[theirs]
    if not settings:
        raise ValueError(f"{source}: no setting was found; is it a rollout's configuration? (words work too: tp2+ep)")
    expert = settings.get("enable_expert_parallel")
    _known("enable_expert_parallel", expert, "it out", settings)
    if expert is None:
        expert = (_whole(settings, "expert_parallel_size") or 1) > 1
    return Configured(RolloutLayout(_whole(settings, "tensor_parallel_size") or 1, bool(expert)), settings, kind, holes)


def _read(source: str, side: Side) -> tuple[dict[str, Any] | None, Kind, tuple[str, ...]]:
    """The settings of one side in ``source``, who reads them, and words that may hold more; no settings when it is neither a file nor arguments, so words.

    Raises:
        ValueError: a file that cannot be read, too large to be a configuration, or in which one name has two values.
    """
    path = Path(source)
    suffix = path.suffix.lower()
    if "--" not in source and suffix in (".yaml", ".yml", ".json", ".sh", ".txt", ".args") and not os.path.isfile(source):
        raise ValueError(f"{source}: no such file")
    if os.path.isfile(source):  # False, not an error, for arguments that are too long for a name
        text = _text(path)
        if suffix in (".yaml", ".yml", ".json"):
            return *_tree(_parsed(path, text), side, source), ()
        if suffix in (".sh", ".slurm", ".sbatch") or text.startswith("#!"):
            raise ValueError(f"{source}: a script is not read; tio doctor --run -- bash {source} records what it starts, and judges that")
        return of_words(split(text, source), side, source)
    if "--" in source or source.startswith("-") or VERL_OVERRIDE.search(source):
        return of_words(split(source, "the arguments"), side, "the arguments")
    return None, "words", ()


def of_words(words: Sequence[str], side: Side, source: str) -> tuple[dict[str, Any], Kind, tuple[str, ...]]:
    """Of a command line: verl's overrides where there are some, else arguments."""
    pairs = [(found[1], found[2]) for word in words if (found := VERL_OVERRIDE.fullmatch(word))]
    if not pairs:
        engine: Kind = "megatron-lm" if side == "trainer" else "vllm"
        return arguments(words, engine), engine, tuple(_alone(words, engine))
    if gone := [word for word in words if re.match(r"~(?:actor_rollout_ref|trainer)\b", word)]:
        raise ValueError(f"{source}: {cut(gone[0], 120)} takes a setting away; write what it shall be")
    tree: dict[str, Any] = {"actor_rollout_ref": {"actor": {"strategy": "megatron"}} if any("ppo_megatron_trainer" in word for word in words) else {}}
    if engines := [word.partition("=")[2] for word in words if re.match(r"\+{0,2}model_engine=", word)]:
        tree["model_engine"] = engines[-1]
    for way, value in dict(pairs).items():  # the last holds, as in Hydra
        *parents, name = way.split(".")
        _not_deeper([*parents, name])
        here = tree
        for parent in parents:
            below = here.get(parent)
            if not isinstance(below, dict):
                below = here[parent] = {}
            here = below
        here[name] = _laid_over(here.get(name), _hydras(value.strip("'\"")))
    return *_tree(tree, side, source), tuple(_other_configurations(words))


def _alone(words: Sequence[str], engine: Kind) -> Iterator[str]:
    """Variables that are no option's value."""
    for before, word in itertools.pairwise(["", *words]):
        flag = options(engine).flag(before)
        if re.fullmatch(r"\$\{?\w+(\[@\])?\}?", word) and (not before.startswith("-") or "=" in before or (flag is not None and flag.words == 0)):
            yield word


def _other_configurations(words: Sequence[str]) -> Iterator[str]:
    """Of a verl command, what makes it read another configuration than verl's own."""
    for word, following in itertools.pairwise([*words, ""]):
        if _GROUP.match(word) or re.match(r"[+~]*hydra\.searchpath=", word):
            yield word
        elif found := _CONFIG.fullmatch(word):
            named = following if found[2] is None else found[2]
            if named.rstrip("/").rpartition("/")[2] not in _VERLS_OWN:
                yield f"{found[1]} {named}"


def _laid_over(before: Any, value: Any) -> Any:
    """Hydra lays a mapping over the one that is there."""
    if not (isinstance(before, dict) and isinstance(value, dict)):
        return value
    return {**before, **{name: _laid_over(before.get(name), one) for name, one in value.items()}}


def _hydras(text: str) -> Any:
    """A value as Hydra reads it: ``{a:b,c:{d:1}}`` is a mapping there, with or without blanks.

    >>> _hydras("{enable:True,path:/x}"), _hydras("3"), _hydras("{x"), _hydras("{}")
    ({'enable': True, 'path': '/x'}, 3, '{x', {})
    """
    if text.startswith("{") and text.endswith("}"):
        try:
            value = read_yaml(re.sub(r":(?=[^\s/])", ": ", text.replace(":/", ": /")))
        except (yaml.YAMLError, ValueError, RecursionError):
            return text
        return value if isinstance(value, dict) else text
    return value_of(text)


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; a configuration has at most {MOST_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error})") from error


def _parsed(path: Path, text: str) -> Any:
    try:
        return read_json(text) if path.suffix.lower() == ".json" else read_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def _tree(data: Any, side: Side, source: str) -> tuple[dict[str, Any], Kind]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{source}: expected a mapping of settings, got {type(data).__name__}")
    if "actor_rollout_ref" in data:
        pairs = [pair for way in VERL[side] for pair in _leaves(_below(data, way), ()) if not _elsewhere(pair[0])]
        if side == "trainer":  # the actor's own settings beside those of its Megatron part, which have been read
            pairs = [pair for pair in pairs if pair[0][0] != "megatron"]
            engine = data.get("model_engine")
            _known("model_engine", engine, "it out", data)
            if engine not in (None, "megatron"):
                pairs.insert(0, (("strategy",), f"model_engine={engine}"))
            elif engine is None and not _below(data, VERL["trainer"][0]) and not any(way[-1] == "strategy" for way, _ in pairs):
                pairs.append((("strategy",), "fsdp, verl's default"))
        # An override is written on top of what it overrides.
        pairs.sort(key=lambda pair: not any(part.startswith("override_") or part == "engine_kwargs" for part in pair[0]))
        return {**_flat(pairs, source), **_verls(data, pairs)}, "verl"
    if side == "rollout":
        return _flat(_leaves(data, ()), source), "vllm"
    return _named_as_parsed(_flat(_leaves(data, ()), source)), "megatron-core" if "language_model" in data or "model_parallel" in data else "megatron-lm"


def _named_as_parsed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A file of Megatron-LM's arguments names a field or spells the argument; ``disable_bias_linear: true`` is ``add_bias_linear`` = False."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        flag = None if name in options("megatron-lm").defaults else options("megatron-lm").flag("--" + name.replace("_", "-"))
        if flag is None:
            found[name] = value
        elif flag.words != 0 or value:  # a switch that is false says nothing
            found[flag.name] = flag.value if flag.words == 0 else value
    return found


def _verls(data: Mapping[Any, Any], pairs: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Of verl's model, which both sides read; and which names were written as megatron-core's or vLLM's own, not as verl's."""
    model = {".".join(way): value for way, value in _leaves(_below(data, ("actor_rollout_ref", "model")), ())}
    found: dict[str, Any] = {"model_path": model["path"]} if model.get("path") is not None else {}
    if isinstance(data["actor_rollout_ref"], Mapping):
        found["actor_rollout_ref"] = data["actor_rollout_ref"]
    for part in ("override_transformer_config", "engine_kwargs"):
        found[part] = tuple(sorted({way[-1].replace("-", "_") for way, value in pairs if part in way[:-1] and value is not None}))
    return found


def _elsewhere(way: Sequence[str]) -> bool:
    if "optim" in way[:-1] and (way[-1] in OPTIMIZERS or "override_optimizer_config" in way[:-1]):
        return False
    return bool(set(way[:-1]) & set(VERL_ELSEWHERE))


def _below(data: Any, way: Sequence[str]) -> Any:
    for name in way:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _not_deeper(way: Sequence[str]) -> None:
    if len(way) > DEEPEST:
        raise ValueError(f"{cut('.'.join(way), 80)}: {len(way)} names deep; a setting has at most {DEEPEST}")


def _leaves(data: Mapping[Any, Any], way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in data.items():
        here = (*way, *str(name).split("."))
        _not_deeper(here)
        if isinstance(value, Mapping) and here[-1].replace("-", "_") not in WHOLE:
            yield from _leaves(value, here)
        else:
            yield here, value


def _flat(pairs: Iterator[tuple[tuple[str, ...], Any]] | Sequence[tuple[tuple[str, ...], Any]], source: str) -> dict[str, Any]:
    """By last name. Only a name that decides something here may not have two values: verl repeats many others."""
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    decide = {*TRAINER_NAMES.values(), *ROLLOUT_NAMES.values(), *DECIDE}
    for way, value in pairs:
        name = way[-1].replace("-", "_")
        if name in decide and name in found and found[name] != value:
            raise ValueError(f"{source}: {places[name]} is {found[name]!r} and {'.'.join(way)} is {value!r}; which one holds?")
        if name not in found:
            found[name], places[name] = value, ".".join(way)
    return found


def _known(name: str, value: Any, what: str, settings: Mapping[str, Any]) -> None:
    if isinstance(value, str) and "$" in value:
        theirs = ", or have verl write all (bash SCRIPT --cfg job --resolve)" if "actor_rollout_ref" in settings else ""
        raise ValueError(f"{name} is {value!r}, a variable that is not set here; write {what}{theirs}")


def _whole(settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is None:
        return None
    _known(name, value, "its number", settings)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def _world(settings: Mapping[str, Any]) -> int | None:
    """All ranks, as the launcher was told; None when it was not."""
    if any("$" in str(settings.get(name)) for name in ("world_size", "nproc_per_node", "n_gpus_per_node", "nnodes")):
        return None
    if settings.get("world_size") is not None:
        return _whole(settings, "world_size")
    per_node = next((name for name in ("nproc_per_node", "n_gpus_per_node") if isinstance(settings.get(name), int)), None)
    if per_node is None:
        return None
    return math.prod([_whole(settings, per_node) or 1, _whole(settings, "nnodes") or 1])
