"""What switches the plug-in on: one reader for every way of naming a contract, shared by trainer and rollout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tio_megatron.contract.spec import Contract
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import shown

VARIABLE = "TIO_CONTRACT"
"""``1`` or ``default`` (the default contract), a JSON object, or the path of a JSON file. Unset, empty or ``0``: off."""

MOST_BYTES = 1 << 20
"""Of a file that names a contract; real ones have some hundred."""


@dataclass(frozen=True)
class Setting:
    """A contract and what may be written beside it: ``vocab_size``, the true vocabulary, for a trainer that cannot know it."""

    contract: Contract
    vocab_size: int | None = None


def read(value: Contract | Mapping[str, Any] | str | Path | None) -> Setting:
    """The setting that ``value`` names.

    Args:
        value: a contract; its fields as a mapping, as JSON text or as the path of a JSON file; ``1``, ``default`` or ``None`` for the
            default contract. Fields left out keep their defaults. A mapping may also hold ``vocab_size``.

    Raises:
        ValueError: neither JSON nor a file, an unknown field, or a value the contract refuses.

    >>> read("default").contract == Contract()
    True
    >>> read('{"cuts": {"attn_row": 4}, "vocab_size": 700}').vocab_size
    700
    >>> read("contract.jsn")
    Traceback (most recent call last):
    ...
    ValueError: contract: 'contract.jsn' is neither 1, default, a JSON object nor a file
    """
    if value is None or value in ("1", "default"):
        return Setting(Contract())
    if isinstance(value, Contract):
        return Setting(value)
    if isinstance(value, str | Path) and not str(value).lstrip().startswith("{"):
        value = _text(Path(value))
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"contract: not JSON ({error})") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"contract: expected a contract, its fields, JSON or a path, got {type(value).__name__}")
    fields = dict(value)
    vocab_size = fields.pop("vocab_size", None)
    if vocab_size is not None and (type(vocab_size) is not int or vocab_size < 1):
        raise ValueError(f"contract: vocab_size must be a positive whole number, got {shown(vocab_size)}")
    try:
        text = json.dumps(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"contract: its fields are no plain data ({error})") from error
    return Setting(Contract.from_json(text), vocab_size)


def _text(path: Path) -> str:
    try:
        found = path.is_file()
        if found and path.stat().st_size > MOST_BYTES:
            raise ValueError(f"contract: {path} has {path.stat().st_size} bytes, a contract has at most {MOST_BYTES}")
        if found:
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"contract: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:  # also a name that no file can have
        raise ValueError(f"contract: {shown(str(path))} cannot be read ({error.strerror or error})") from error
    raise ValueError(f"contract: {shown(str(path), 200)} is neither 1, default, a JSON object nor a file")


def from_environment(environ: Mapping[str, str] | None = None) -> Setting | None:
    """What ``TIO_CONTRACT`` names, or ``None`` when it is off.

    Raises:
        ValueError: the variable names nothing that can be read; the message repeats it.

    >>> from_environment({}) is None, from_environment({"TIO_CONTRACT": "0"}) is None
    (True, True)
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if value in ("", "0"):
        return None
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={shown(value, 200)}: {error}") from error
