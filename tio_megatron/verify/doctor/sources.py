"""Whether both sides read the model that is looked at, and its weights and constants as they stand in its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tio_megatron.contract.messages import shown
from tio_megatron.integrations.verl import refusals
from tio_megatron.verify.doctor.findings import Finding
from tio_megatron.verify.doctor.options import OFF, TOPIC
from tio_megatron.verify.doctor.running import SAMPLING_NAMES, Running, tree_of


def check(trainer: Running, rollout: Running, model: str, said: Mapping[str, Any]) -> Iterator[Finding]:
    """Of both sides.

    Args:
        trainer: as it will run.
        rollout: as it will run.
        model: what ``--model`` says.
        said: its ``config.json``.
    """
    yield from _model(rollout, model)
    yield from _weights(rollout)
    yield from _overrides(rollout)
    if trainer.kind == "verl" and trainer.get("model_path") != rollout.get("model_path"):
        yield from _model(trainer, model)
    for run in (trainer, rollout):
        if run.kind == "verl" and (run is trainer or trainer.kind != "verl"):
            for name, value in refusals.other_model(run.get("actor_rollout_ref") or {}, said).items():
                what = f"verl: actor_rollout_ref.model.override_config.{name} = {shown(value)} is not judged: it is laid over the model's config.json"
                yield Finding("unknown", TOPIC, what, "leave it out, or change config.json, which both sides read")
        if run.get("model_lora_rank") and (run is trainer or trainer.kind != "verl"):
            yield Finding("bad", TOPIC, f"verl: actor_rollout_ref.model.lora_rank = {run['model_lora_rank']}: adapters are not covered", "0 would work")


def _model(run: Running, model: str) -> Iterator[Finding]:
    name, side = ("model_path", "verl: actor_rollout_ref.model.path") if run.kind == "verl" else ("model", "rollout: model")
    theirs = run.get(name)
    if theirs is None:
        return
    said = os.path.expanduser(os.path.expandvars(str(theirs)))
    own = Path(os.path.expanduser(model)).absolute()
    own = own.parent if own.name == "config.json" else own
    if "$" in said and Path(said).name.lower() == own.name.lower():  # as in a launch script that makes its folders under one of its arguments
        yield Finding("note", TOPIC, f"{side} = {shown(theirs)}: a variable that is not set here; its last part is --model's, no more of it was compared")
        return
    if "$" in said:
        yield Finding("unknown", TOPIC, f"{side} = {shown(theirs)}: a variable that is not set here, so not compared with --model", f"write it out: {model}")
        return
    here, there = Path(os.path.expanduser(model)), Path(said)
    here = here.parent if here.name == "config.json" else here
    if here.exists() and there.exists():
        same = os.path.samefile(here, there)
    else:  # names of a hub, or a folder of the machine it will run on: their last parts are the model's name
        same = here.name.lower() == there.name.lower()
    if not same:
        yield Finding("bad", TOPIC, f"{side} = {shown(theirs)}, looked at was --model {model}: another model", f"{model} on both sides; or --model {theirs}")


def _weights(run: Running) -> Iterator[Finding]:
    if run.kind == "vllm" and run.get("load_format") == "dummy":  # verl pushes the trainer's weights before it samples
        yield Finding(
            "unknown",
            TOPIC,
            "rollout: load_format = 'dummy': random weights until somebody pushes the trainer's into the engine, all of them",
            "auto; or push_weights before the first request, which refuses an incomplete set",
        )


def _overrides(run: Running) -> Iterator[Finding]:
    for name in ("hf_overrides", "override_generation_config"):
        value = run.get(name)
        tree = tree_of(value)
        dotted = {key.partition(".")[2]: run[key] for key in run.written if key.startswith(f"{name}.")}
        laid: dict[str, Any] = {**(tree or {}), **dotted}
        if name == "hf_overrides" and laid:
            what = f"rollout: hf_overrides = {shown(laid)}: vLLM computes another model than config.json says, and the trainer does not"
            yield Finding("bad", TOPIC, what, "leave it out; or change config.json, which both sides read")
        elif name == "hf_overrides" and value not in OFF and tree is None:
            yield Finding("unknown", TOPIC, f"rollout: hf_overrides = {shown(value)} is not judged: no JSON object of settings", "leave it out")
        elif name == "override_generation_config":
            if value not in OFF and tree is None:
                yield Finding("unknown", TOPIC, f"rollout: {name} = {shown(value)} is not judged: no JSON object of settings", "leave it out")
            if more := sorted(set(laid) - {*SAMPLING_NAMES, "max_new_tokens"}):
                yield Finding("unknown", TOPIC, f"rollout: {name} sets {', '.join(more)}: not judged", "leave it out")
