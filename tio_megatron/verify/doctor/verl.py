"""verl's own settings, by the rows by which its workers refuse them when they build (:mod:`tio_megatron.integrations.verl.refusals`)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations.option_facts import options
from tio_megatron.integrations.verl import refusals
from tio_megatron.integrations.verl.refusals import TREE
from tio_megatron.verify.doctor import between, coverage, running
from tio_megatron.verify.doctor import options as rows
from tio_megatron.verify.doctor.arguments import value_of
from tio_megatron.verify.doctor.models import Model
from tio_megatron.verify.doctor.running import Running

_SELECT = re.compile(r"\$\{oc\.select:([\w.]+)(?:,([^{}]*))?\}")
_JUDGED = frozenset(rule.option for rule in (*refusals.SIDE_RULES, *refusals.MODEL_RULES, *refusals.ROLLOUT_RULES)) | {
    "hf_config_path",
    "logprobs_mode",
    "override_config.any",
    "engine_kwargs.vllm.hf_overrides",
}


def check(trainer: Running, rollout: Running, model: Model) -> Iterator[Finding]:
    """What its workers would refuse, of both sides' configurations, and what refers to a variable that is not known."""
    for run, role in ((trainer, "actor_ref"), (rollout, "rollout")):
        if run.kind == "verl":
            tree, left = _resolved(run.get(TREE) or {})
            for name, value in left.items():
                yield _unset(f"{TREE}.{name}", value, "verl")
            for finding in refusals.problems(_with_defaults(tree, role, left), role, model.said):
                yield replace(finding, side="verl")
    if trainer.kind == "verl":
        yield from _of_ref(trainer, model)


def _unset(option: str, value: Any, side: str) -> Finding:
    return Finding("not judged: a variable that is not set here", "write it out", option, value, side, level="unknown")


def _of_ref(trainer: Running, model: Model) -> Iterator[Finding]:
    """What the reference model has otherwise than the actor, by the trainer's tables. ``model`` is the one that both sides read."""
    here: Any = trainer.get(TREE) or {}
    for name in ("ref", "megatron"):
        here = here.get(name) if isinstance(here, Mapping) else None
    if not isinstance(here, Mapping):
        return
    laid = here.get("override_transformer_config")
    asked = {**(laid if isinstance(laid, Mapping) else {}), **{name: here[name] for name in ("dtype", "virtual_pipeline_model_parallel_size") if name in here}}
    left = {str(name): value for name, value in asked.items() if isinstance(value, str) and "$" in value and not _SELECT.fullmatch(value)}
    said = {str(name): value for name, value in asked.items() if not (isinstance(value, str) and "$" in value)}
    run = running.trainer("verl", {**said, "override_transformer_config": tuple(laid if isinstance(laid, Mapping) else ())})
    rooms = (rows.trainer(run, training=False), between.same_model(run, model), between.same_function(run), coverage.of_trainer(run))
    for finding in itertools.chain(*rooms):
        if finding.option in said:
            yield replace(finding, side="ref", works=finding.works.replace(f"{TREE}.actor.", f"{TREE}.ref."))
    for name, value in left.items():
        yield _unset(name, value, "ref")
    if "dtype" in said and said["dtype"] != (actors := running.dtype(trainer)):
        yield Finding(f"the actor computes in {actors}", f"{TREE}.ref.megatron.dtype={actors} would work", "dtype", said["dtype"], "ref")


def _with_defaults(tree: Mapping[str, Any], role: str, left: Mapping[str, str]) -> dict[str, Any]:
    """With the default that breaks (verl's own bridge), where nobody has written anything."""
    if "actor" not in role or "actor" not in tree or "actor.megatron.vanilla_mbridge" in left:
        return dict(tree)
    actor = tree["actor"] if isinstance(tree["actor"], Mapping) else {}
    megatron = actor.get("megatron")
    default = {"vanilla_mbridge": options("verl").defaults["trainer"]["vanilla_mbridge"]}
    return {**tree, "actor": {**actor, "megatron": {**default, **(megatron if isinstance(megatron, Mapping) else {})}}}


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
