"""What a training checkpoint says beside its tensors, how ranks agree on it, and every reason to refuse one. No tensor is read here."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tio_megatron import kernels
from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, CheckpointError, damaged_files, tensor_table, unlisted_files
from tio_megatron.contract import ModelShape
from tio_megatron.integrations.megatron.applied import state as in_force
from tio_megatron.integrations.megatron.applied.workers import this_worker
from tio_megatron.integrations.megatron.resume.fields import (
    HELD,
    PLAIN,
    Kind,
    group_dicts,
    group_rows,
    kind_of,
    model_fields,
    optimizer_fields,
    plain,
    schedule_fields,
    tensor_kinds,
    training_fields,
)
from tio_megatron.integrations.megatron.resume.optimizer_state import KINDS
from tio_megatron.integrations.megatron.training.grad_sums import BufferPart, sums_of
from tio_megatron.integrations.megatron.training.random_states import check_random_states
from tio_megatron.integrations.megatron.weights.pieces import tensor_names, unwrap

Value = TypeVar("Value")
MODEL = "model"
"""The folder of the weights, an HF checkpoint."""
_SHOWN = 8


def agreed(work: Callable[[], Value], more: str = "") -> Value:
    """What ``work`` returns on this rank, if it raised on none. A collective.

    Raises:
        CheckpointError: on all ranks, with what went wrong on any; each message once.
    """
    value, problem, cause = None, None, None
    try:
        value = work()
    except Exception as error:  # whatever it is: the other ranks wait for this one's word
        problem, cause = (str(error) or repr(error)), error
    said = list(dict.fromkeys(theirs for theirs in gathered(problem) if theirs is not None))
    if said:
        raise CheckpointError("; ".join(said[:_SHOWN]) + more) from cause
    return value  # type: ignore[return-value]


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank, on every rank. Only between ranks of one run: never from a file."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def from_first(make: Callable[[], str]) -> str:
    """What ``make`` returns on rank 0, on every rank; its error there is everyone's."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    return str(gathered(agreed(lambda: make() if first else ""))[0])


def layout() -> dict[str, int]:
    """The sizes of the groups of ranks."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def bytes_of(config: CheckpointConfig) -> int:
    """Bytes of a checkpoint's tensors: the weights and three times fp32."""
    width = {"bfloat16": 2, "float32": 4}[config.dtype] + 3 * 4
    return sum(spec.numel for spec in tensor_table(config.shape).values()) * width


def local_state(
    model: torch.nn.Module,
    optimizer: Any,
    schedule: Any,
    config: CheckpointConfig,
    *,
    step: int,
    position: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What this rank would write into ``state.json``. ``largest``, ``groups`` and ``kinds`` hold its own part, the rest is the same on all ranks.

    Raises:
        ValueError: no contract is in force, the model was wrapped outside of it, gradients are half added up, or something is not JSON.
    """
    setting = in_force.session()
    if setting is None:
        raise ValueError("a training checkpoint needs the contract in force: call tio_megatron.apply(...) first")
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a whole number from 0 on, got {step!r}")
    for p in _sums(model):
        home = p.home()
        if home is not None and home.adding and p.partials:
            raise ValueError(f"gradients are being added up ({p.name} has {p.partials} terms): save between two steps")
    return {
        "step": step,
        "position": plain("position", position),
        "settings": plain("settings", settings),
        "contract": setting.contract.to_dict(),
        "fingerprint": setting.contract.fingerprint(kernels.version(setting.contract.family)),
        "kernels": kernels.version(setting.contract.family),
        "model": model_fields(model, config),
        "training": training_fields(model),
        "schedule": schedule_fields(schedule),
        "optimizer": optimizer_fields(optimizer, schedule),
        "written": {"layout": layout(), "versions": _versions()},
        "largest": _largest(model, config.shape),
        "groups": list(group_rows(optimizer, schedule)),
        "kinds": {name: kind for name, kind in tensor_kinds(model, optimizer, config.shape).items() if kind != PLAIN},
    }


def merged(everyone: list[tuple[dict[str, float], list[dict[str, Any]], dict[str, Kind], dict[str, Any]]]) -> dict[str, Any]:
    """The state of all ranks as one: largest partials, groups, tensors of another kind than the plain one, and what is the same on all.

    Raises:
        ValueError: ranks disagree, with what about.
    """
    largest: dict[str, str] = {}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    steps = set()
    kinds: dict[str, Kind] = {}
    for rank, (theirs, rows, special, state) in enumerate(everyone):
        if differing := [name for name in state if state[name] != everyone[0][3][name]]:
            raise ValueError(f"rank {rank} and rank 0 would save another {', '.join(differing)}")
        for name, value in theirs.items():
            if largest.setdefault(name, value.hex()) != value.hex():
                raise ValueError(f"rank {rank} remembers {value!r} as the largest partial of {name}, another rank {float.fromhex(largest[name])!r}")
        kinds |= special
        for row in rows:
            steps.add(row["step"])
            known = groups.setdefault((row["wd_mult"], row["lr_mult"]), row)
            if known != row:
                raise ValueError(f"rank {rank}: parameter groups of one kind differ: {row} and {known}")
    if len(steps) != 1:
        raise ValueError(f"optimizers of one run have taken different numbers of steps: {sorted(steps)}")
    rows = [
        {name: value for name, value in groups[kind].items() if name != "step"} | {"tensors": sorted(name for name in kinds if kinds[name] == kind)}
        for kind in sorted(groups)
    ]
    state = dict(everyone[0][3])
    state["optimizer"] = state["optimizer"] | {"step": steps.pop(), "groups": rows}
    return state | {"largest": dict(sorted(largest.items()))}


def same_files_everywhere(folder: Path, saved: Mapping[str, Any]) -> None:
    """Check every file on every machine; the ranks of one share them. A collective.

    Raises:
        CheckpointError: names every file that is missing, truncated or altered.
    """
    machine = platform.node()
    everyone = gathered((machine, json.dumps(saved, sort_keys=True)))
    other = sorted({theirs for theirs, text in everyone if text != everyone[0][1]})
    if other:
        raise CheckpointError(f"{folder}: {', '.join(other)} and {everyone[0][0]} hold different checkpoints of this name; copy it again")
    mine = dist.get_rank() if dist.is_initialized() else 0
    here = [rank for rank, (theirs, _) in enumerate(everyone) if theirs == machine]
    # Large files first, each to the next rank: the work is even.
    names = sorted(saved["files"], key=lambda name: (-saved["files"][name]["bytes"], name))[here.index(mine) :: len(here)]

    def look() -> None:
        lines = unlisted_files(folder, saved["files"]) + damaged_files(folder, saved["files"], names)
        if lines:
            raise CheckpointError(f"{folder}: {'; '.join(lines[:_SHOWN])}; copy it again or take another")

    agreed(look)


def check(
    folder: Path,
    saved: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: Any,
    schedule: Any,
    config: CheckpointConfig,
    settings: Mapping[str, Any] | None,
    allow: Collection[str],
) -> None:
    """Refuse a checkpoint that cannot be loaded whole, or does not go on as it would have gone on where it was written.

    Raises:
        ValueError: names every field that differs, as ``field: here / in the checkpoint``.
    """
    setting = in_force.session()
    if setting is None:
        raise ValueError("a training checkpoint needs the contract in force: call tio_megatron.apply(...) first")
    lines = _differences("contract", _flat(setting.contract.to_dict()), _flat(saved["contract"]))
    lines += _differences("", {"kernels": kernels.version(setting.contract.family)}, {"kernels": saved["kernels"]})
    if lines:
        raise ValueError(f"{folder}: written under another contract (fingerprint {saved['fingerprint']}): {'; '.join(lines)}")
    lines = _differences("model", model_fields(model, config), saved["model"])
    if lines:
        raise ValueError(f"{folder}: the checkpoint of another model: {'; '.join(lines)}")
    if (schedule is None) != (saved["schedule"] is None):
        raise ValueError(f"{folder}: it was saved {'without' if schedule is not None else 'with'} a schedule, and resumes the same way")
    lines = [] if settings is None else _differences("settings", plain("settings", settings), saved["settings"])
    lines += _differences("training", training_fields(model), saved["training"])
    if schedule is not None:
        # Steps are where it stands, not what it is.
        lines += _differences("schedule", (schedule_fields(schedule) or {}) | {"num_steps": 0}, saved["schedule"] | {"num_steps": 0})
    known = {name: value for name, value in saved["optimizer"].items() if name not in ("step", "groups")}
    lines += _differences("optimizer", optimizer_fields(optimizer, schedule), known)
    lines += _group_differences(model, optimizer, schedule, config.shape, saved["optimizer"]["groups"])
    lines = [line for line in dict.fromkeys(lines) if line.split(":")[0] not in allow]
    if lines:
        raise ValueError(f"{folder}: written by another training (here / there; allow=[...] lets fields differ): {'; '.join(lines)}")
    world = dist.get_world_size() if dist.is_initialized() else 1
    try:
        _largest_here(model, config.shape, saved["largest"])
        check_random_states(saved["random"], same_layout=layout() == saved["written"]["layout"], world=world)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    for name in (MODEL, *KINDS):
        with Checkpoint(folder / name) as found:
            wanted = (config.shape, config.dtype if name == MODEL else "float32")
            if (found.config.shape, found.config.dtype) != wanted:
                raise ValueError(f"{folder / name}: holds {found.config.dtype} tensors of {found.config.shape}, it must hold {wanted[1]} ones of {wanted[0]}")
            found.require_values(least=0.0 if name == "exp_avg_sq" else None, share=(dist.get_rank() if world > 1 else 0, world))


def _group_differences(model: torch.nn.Module, optimizer: Any, schedule: Any, shape: ModelShape, saved: list[dict[str, Any]]) -> list[str]:
    """Numbers of parameter groups, and tensors that are in a group of another kind."""
    rows = {(row["wd_mult"], row["lr_mult"]): row for row in saved}
    lines = []
    for row in group_rows(optimizer, schedule):
        found = rows.get((row["wd_mult"], row["lr_mult"]))
        if found is None:
            lines.append(f"optimizer.groups: one with wd_mult {row['wd_mult']} and lr_mult {row['lr_mult']} / none")
        else:
            lines += [f"optimizer.{name}: {row[name]} / {found[name]}" for name in HELD if row[name] != found[name]]
    there = {name: kind for kind, row in rows.items() for name in row["tensors"]}
    moved: dict[str, list[str]] = {}
    for name, here in tensor_kinds(model, optimizer, shape).items():
        for field, ours, theirs in zip(("wd_mult", "lr_mult"), here, there.get(name, PLAIN), strict=True):
            if ours != theirs:
                moved.setdefault(f"optimizer.{field}: {ours} / {theirs}", []).append(name)
    return lines + [f"{line} of {min(names)}" for line, names in moved.items()]


def set_largest(model: torch.nn.Module, shape: ModelShape, largest: Mapping[str, str]) -> None:
    """Give every sum its largest partial, and open the sums on the grid that follows from it."""
    for p, value in _largest_here(model, shape, largest):
        p.largest = value
    for sums in sums_of([model]):
        sums.reset()


def set_optimizer(optimizer: Any, schedule: Any, saved: Mapping[str, Any], allow: Collection[str] = ()) -> None:
    """Steps, learning rates and weight decays of every group; what ``allow`` names stays this run's."""
    rows = {(row["wd_mult"], row["lr_mult"]): row for row in saved["optimizer"]["groups"]}
    for group in group_dicts(optimizer):
        group["step"] = saved["optimizer"]["step"]
        found = rows.get(kind_of(group))
        if found is not None:
            group.update({name: found[name] for name in ("lr", "weight_decay") if f"optimizer.{name}" not in allow})
    if schedule is not None:
        # Not its load_state_dict: that adds the steps to those already taken.
        schedule.num_steps = saved["schedule"]["num_steps"]
        schedule.step(increment=0)


def _sums(model: torch.nn.Module) -> list[BufferPart]:
    unwrap(model)  # refuses a list of chunks
    found = [p for sums in sums_of([model]) for p in sums.parameters]
    if not found:
        raise ValueError("the model keeps no integer sums: wrap it in DistributedDataParallel under tio_megatron.apply(...)")
    return found


def _named_sums(model: torch.nn.Module, shape: ModelShape) -> Iterator[tuple[BufferPart, tuple[str, ...]]]:
    _sums(model)
    for parameter, names in tensor_names(model, shape):
        if not hasattr(parameter, "tio_sum"):
            raise ValueError(f"{names[0]}: its gradient is not summed by us (is it frozen?)")
        yield parameter.tio_sum, names


def _largest(model: torch.nn.Module, shape: ModelShape) -> dict[str, float]:
    return {name: float(p.largest) for p, names in _named_sums(model, shape) for name in names}


def _largest_here(model: torch.nn.Module, shape: ModelShape, largest: Mapping[str, str]) -> list[tuple[BufferPart, float]]:
    pairs = []
    for p, names in _named_sums(model, shape):
        missing = [name for name in names if name not in largest]
        if missing:
            raise ValueError(f"the checkpoint has no largest partial of {missing[0]}")
        values = {float.fromhex(largest[name]) for name in names}
        if len(values) != 1:
            raise ValueError(f"{', '.join(names)} are one sum here, but the checkpoint has different largest partials of them")
        pairs.append((p, values.pop()))
    return pairs


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    cuts = {f"cuts.{name}": count for name, count in fields.get("cuts", {}).items()}
    return {**{name: value for name, value in fields.items() if name != "cuts"}, **cuts}


def _differences(prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    dot = f"{prefix}." if prefix else ""
    return [f"{dot}{name}: {ours.get(name)} / {theirs.get(name)}" for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _versions() -> dict[str, str]:
    """What wrote a checkpoint, for whoever reads it later."""
    mine = this_worker()
    return {name: str(mine[name]) for name in ("tio_megatron", "torch", "engine", "kernels")} | {"packages": ", ".join(mine["packages"])}
