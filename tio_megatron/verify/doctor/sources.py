"""Whether both sides read the model that is looked at, and its weights and constants as they stand in its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tio_megatron.findings.finding import Finding
from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor.options import OFF
from tio_megatron.verify.doctor.running import SAMPLING_NAMES, Running, mapping_of, tree_of


def check(trainer: Running, rollout: Running, model: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    """Of both sides.

    Args:
        trainer: as it will run.
        rollout: as it will run.
        model: what ``--model`` says.
        said: its ``config.json``.
    """
    yield from _model(rollout, model)
    if rollout.kind == "vllm" and rollout.get("load_format") == "dummy":  # verl pushes the trainer's weights before it samples
        why = "random weights until somebody pushes the trainer's into the engine, all of them"
        works = "auto; or push_weights before the first request, which refuses an incomplete set"
        yield Finding(why, works, "load_format", "dummy", "rollout", level="unknown")
    yield from _overrides(rollout)
    if trainer.kind == "verl" and trainer.get("model_path") != rollout.get("model_path"):
        yield from _model(trainer, model)
    run = trainer if trainer.kind == "verl" else rollout
    if run.kind == "verl":
        for name, value in refusals.other_model(run.get(refusals.TREE) or {}, said).items():
            why, works = "not judged: it is laid over the model's config.json", "leave it out, or change config.json, which both sides read"
            yield Finding(why, works, f"{refusals.TREE}.model.override_config.{name}", value, "verl", level="unknown")


def _model(run: Running, model: str) -> Iterator[Finding]:
    name = "model_path" if run.kind == "verl" else "model"
    option, side = (f"{refusals.TREE}.model.path", "verl") if run.kind == "verl" else ("model", "rollout")
    theirs = run.get(name)
    if theirs is None or name not in run.written:
        return
    said = os.path.expanduser(os.path.expandvars(str(theirs)))
    here, there = Path(os.path.expanduser(model)), Path(said)
    here = here.parent if here.name == "config.json" else here
    if "$" in said and there.name.lower() == here.absolute().name.lower():  # as where folders are made under one of a script's arguments
        yield Finding("a variable that is not set here; its last part is --model's, no more of it was compared", "", option, theirs, side, level="note")
    elif "$" in said:
        yield Finding("a variable that is not set here, so not compared with --model", f"write it out: {model}", option, theirs, side, level="unknown")
    # names of a hub, or a folder of the machine it will run on: their last parts are the model's name
    elif not (os.path.samefile(here, there) if here.exists() and there.exists() else here.name.lower() == there.name.lower()):
        yield Finding(f"looked at was --model {model}: another model", f"{model} on both sides; or --model {theirs}", option, theirs, side)


def _overrides(run: Running) -> Iterator[Finding]:
    for name in ("hf_overrides", "override_generation_config"):
        value, laid = run.get(name), mapping_of(run, name)
        if value not in OFF and tree_of(value) is None:
            yield Finding("not judged: no JSON object of settings", "leave it out", name, value, "rollout", level="unknown")
        elif name == "hf_overrides" and laid:
            why = "vLLM computes another model than config.json says, and the trainer does not"
            yield Finding(why, "leave it out; or change config.json, which both sides read", name, laid, "rollout")
        elif name == "override_generation_config" and (more := sorted(set(laid) - {*SAMPLING_NAMES, "max_new_tokens"})):
            yield Finding(f"sets {', '.join(more)}: not judged", "leave it out", name, laid, "rollout", level="unknown")
