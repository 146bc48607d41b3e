"""verl's own settings, by the tables by which its workers refuse them when they build (:mod:`tio_megatron.integrations.verl.refusals`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor import between, coverage, options, running
from tio_megatron.verify.doctor.arguments import value_of
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.models import Model
from tio_megatron.verify.doctor.options import TOPIC
from tio_megatron.verify.doctor.running import Running

TREE = "actor_rollout_ref"
"""Under this name a verl configuration holds its settings as verl has them, nested."""
_BREAK: dict[str, Any] = {"megatron": {"vanilla_mbridge": False}}
"""verl 0.9.1's defaults of the actor that are refused; all others in the tables are not."""
_GENERAL = frozenset({"enable", "mode", "name", "rank"})
_SELECT = re.compile(r"\$\{oc\.select:([\w.]+)(?:,([^{}]*))?\}")
_JUDGED = frozenset(rule.option for rule in (*refusals.SIDE_RULES, *refusals.MODEL_RULES, *refusals.ROLLOUT_RULES)) | {
    "hf_config_path",
    "logprobs_mode",
    "override_config.any",
    "engine_kwargs.vllm.hf_overrides",
}


def judge(trainer: Running, rollout: Running, found: Sequence[Finding], model: Model) -> Iterator[Finding]:
    """``found``, and one ``bad`` for each line of the tables about which it says nothing; what it calls unknown is bad then."""
    lines: dict[str, Finding] = {}
    for run, role in ((trainer, "actor_ref"), (rollout, "rollout")):
        if run.kind == "verl":
            tree, left = _resolved(run.get(TREE) or {})
            for name, value in left.items():
                what = f"verl: {TREE}.{name} = {value} is not judged: a variable that is not set here"
                lines[name] = Finding("unknown", TOPIC, what, "write it out")
            for line in refusals.problems(_with_defaults(tree, role, left), role, model.said):
                what, _, works = line.rpartition("; ")
                lines[line.partition("=")[0]] = Finding("bad", TOPIC, f"verl: {what}", works)
    for one in found:
        named = [name for name in lines if one.topic == TOPIC and re.search(rf"\b{re.escape(_option(name))}\b|^\w+: {_last(name)} = ", one.what)]
        if one.level == "unknown" and named:
            yield from (lines.pop(name) for name in named)
            continue
        if one.level == "bad":
            for name in named:
                del lines[name]
        yield one
    yield from lines.values()


def of_ref(trainer: Running, model: Model) -> Iterator[Finding]:
    """What the reference model has otherwise than the actor, by the trainer's tables. ``model`` is the one that both sides read."""
    here: Any = (trainer.get(TREE) or {}) if trainer.kind == "verl" else {}
    for name in ("ref", "megatron"):
        here = here.get(name) if isinstance(here, Mapping) else None
    if not isinstance(here, Mapping):
        return
    laid = here.get("override_transformer_config")
    asked = {**(laid if isinstance(laid, Mapping) else {}), **{name: here[name] for name in ("dtype", "virtual_pipeline_model_parallel_size") if name in here}}
    left = {str(name): value for name, value in asked.items() if isinstance(value, str) and "$" in value and not _SELECT.fullmatch(value)}
    said = {str(name): value for name, value in asked.items() if not (isinstance(value, str) and "$" in value)}
    run = running.trainer("verl", {**said, "override_transformer_config": tuple(laid if isinstance(laid, Mapping) else ())}, left)
    rooms = (options.trainer(run, training=False), between.same_model(run, model), between.same_function(run), coverage.of_trainer(run))
    for one in itertools.chain(*rooms):
        if any(re.search(rf"\b{re.escape(name)}\b", one.what) for name in said) or "virtual pipeline" in one.what:
            yield replace(one, what=one.what.replace("trainer: ", "ref: ", 1), works=one.works.replace(f"{TREE}.actor.", f"{TREE}.ref."))
    for name, value in left.items():
        yield Finding("unknown", TOPIC, f"ref: {name} = {value} is not judged: a variable that is not set here", "write it out")
    if "dtype" in said and said["dtype"] != running.dtype(trainer):
        what = f"ref: computes in {said['dtype']}, the actor in {running.dtype(trainer)}"
        yield Finding("bad", TOPIC, what, f"{TREE}.ref.megatron.dtype={running.dtype(trainer)} would work")


def _option(name: str) -> str:
    """What other rooms call a setting: the last part of its name, with the one before it where that says little.

    >>> _option("actor_rollout_ref.rollout.engine_kwargs.vllm.hf-overrides"), _option("actor_rollout_ref.actor.qat.enable")
    ('hf_overrides', 'qat.enable')
    """
    before, last = name.split(".")[:-1], _last(name)
    return f"{before[-1]}.{last}" if last in _GENERAL and before else last


def _last(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_")


def _with_defaults(tree: Mapping[str, Any], role: str, left: Mapping[str, str]) -> dict[str, Any]:
    """With the defaults that break, where nobody has written anything."""
    if "actor" not in role or "actor" not in tree or "actor.megatron.vanilla_mbridge" in left:
        return dict(tree)
    actor = tree["actor"] if isinstance(tree["actor"], Mapping) else {}
    megatron = actor.get("megatron")
    return {**tree, "actor": {**actor, "megatron": {**_BREAK["megatron"], **(megatron if isinstance(megatron, Mapping) else {})}}}


def _resolved(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings with their ``${oc.select:NAME,DEFAULT}`` filled in; and what of the tables' settings refers to anything else (``$NAME``, ``${...}``),
    by its name, which is left out of the first."""
    left: dict[str, str] = {}

    def value_at(path: str) -> Any:
        here: Any = {TREE: tree}
        for name in path.split("."):
            here = here.get(name) if isinstance(here, Mapping) else None
        return here

    def filled(here: Mapping[str, Any], way: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in here.items():
            if isinstance(value, Mapping):
                made[name] = filled(value, f"{way}{name}.")
                continue
            for _ in range(4):  # one that refers to another
                chosen = _SELECT.fullmatch(value) if isinstance(value, str) else None
                if chosen is None:
                    break
                value = value_at(chosen[1]) if value_at(chosen[1]) is not None else value_of(chosen[2] or "null")
            if not (isinstance(value, str) and "$" in value):
                made[name] = value
            elif any(f"{one}.".startswith(f"{f'{way}{name}'.partition('.')[2]}.") for one in _JUDGED):  # one of them, or a mapping with some
                left[f"{way}{name}"] = value
        return made

    resolved = filled(tree, "")
    model = tree.get("model")
    if isinstance(model, Mapping) and "$" in str(model.get("path")) and resolved["model"].pop("hf_config_path", None) is not None:
        left.setdefault("model.hf_config_path", f"{model['hf_config_path']}, beside model.path = {model['path']}")
    return resolved, left
