"""What every field of a training checkpoint's ``state.json`` must be: checked whole, before anything of it is used.

Its SHA-256 says that the file is the one that was written; this says that it can be loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from tio_megatron.checkpoint.config import CheckpointError
from tio_megatron.findings.messages import shown

Check = Callable[[str, Any], Iterator[str]]
"""(name of the field, its value) -> what is wrong with it, each line with the name."""

_LARGEST_FP32 = float.fromhex("0x1.fffffep+127")
_SHOWN = 8
_MISSING = object()


def check_fields(where: str, state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks a field, or has one that cannot be used.

    Args:
        where: the file, for the message.
        state: its contents.

    Raises:
        CheckpointError: names the fields.
    """
    lines = list(_STATE("", state))
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise CheckpointError(f"{where}: {'; '.join(lines[:_SHOWN])}{more}")


def _is(kind: str, fits: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> Iterator[str]:
        if value is _MISSING:
            yield f"{name} is missing"
        elif not fits(value):
            yield f"{name} is {shown(value)}, it must be {kind}"

    return check


def _object(fields: Mapping[str, Check] | None = None, each: Check | None = None, names: Callable[[str], bool] = lambda name: True, least: int = 0) -> Check:
    """An object with ``fields`` (and others), every value of which passes ``each``, and every name ``names``."""
    plain = _is("an object", lambda value: isinstance(value, dict))

    def check(name: str, value: Any) -> Iterator[str]:
        if not isinstance(value, dict):
            yield from plain(name, value)
            return
        dot = f"{name}." if name else ""
        if len(value) < least:
            yield f"{name} is empty"
        yield from (f"{name} names {shown(key)}, which cannot be" for key in value if not names(key))
        for field, inner in (fields or {}).items():
            yield from inner(f"{dot}{field}", value.get(field, _MISSING))
        if each is not None:
            for field, held in value.items():
                yield from each(f"{dot}{field}", held)

    return check


def _list(each: Check, least: int = 0, most: int | None = None) -> Check:
    plain = _is("a list", lambda value: isinstance(value, list))

    def check(name: str, value: Any) -> Iterator[str]:
        if not isinstance(value, list):
            yield from plain(name, value)
        elif len(value) < least or (most is not None and len(value) > most):
            yield f"{name} has {len(value)} entries, it must have {least}{' or more' if most is None else ''}"
        else:
            for index, held in enumerate(value):
                yield from each(f"{name}[{index}]", held)

    return check


def _or_null(inner: Check) -> Check:
    return lambda name, value: iter(()) if value is None else inner(name, value)


def _finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_partial(value: Any) -> bool:
    """Whether it is a partial sum's size: a hexadecimal number from 0 on, at most fp32's largest."""
    try:
        number = float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return math.copysign(1.0, number) > 0 and number <= _LARGEST_FP32


def _is_inside(name: str) -> bool:
    """Whether a file's name stays in its folder."""
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


_ANY = _is("anything", lambda value: True)
_TEXT = _is("text", lambda value: isinstance(value, str))
_COUNT = _is("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < 1 << 62)
_NUMBER = _is("a finite number", _finite)
_FILE = {"bytes": _COUNT, "sha256": _is("64 hexadecimal digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))}
_GROUP = {
    **{name: _NUMBER for name in ("wd_mult", "lr_mult", "lr", "weight_decay", "eps")},
    **{name: _or_null(_NUMBER) for name in ("max_lr", "min_lr", "start_wd", "end_wd")},
    "betas": _list(_NUMBER, 2, 2),
    "tensors": _list(_TEXT),
}
_RANDOM = _object({"ranks": _list(_object(each=_TEXT), 1), "states": _object(each=_TEXT)})


def _random(name: str, value: Any) -> Iterator[str]:
    wrong = list(_RANDOM(name, value))
    yield from wrong
    if not wrong:
        for rank, theirs in enumerate(value["ranks"]):
            yield from (f"{name}.ranks[{rank}].{each} is {shown(key)}, no state has that name" for each, key in theirs.items() if key not in value["states"])


_STATE = _object(
    {
        "step": _COUNT,
        "position": _object(),
        "settings": _object(),
        "contract": _object({"cuts": _object()}),
        "fingerprint": _TEXT,
        "kernels": _TEXT,
        "model": _object(least=1),
        "training": _object(least=1),
        "optimizer": _object({"step": _COUNT, "clip_grad": _NUMBER, "groups": _list(_object(_GROUP), 1)}),
        "schedule": _or_null(_object({"num_steps": _COUNT})),
        "largest": _object(each=_is("a hexadecimal number from 0 on that fp32 can hold", _is_partial)),
        "random": _random,
        "written": _object({"layout": _object(each=_COUNT), "versions": _object()}),
        "files": _object(each=_object(_FILE), names=_is_inside, least=1),
    }
)
