"""A batch as one safetensors file, which carries the SHA-256 of its own contents and of the file before it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tio_megatron.files.safetensors_header import parse_header, read_header
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import cut, shown
from tio_megatron.rollouts.batch import ARRAYS, OPTIONAL, About, Batch
from tio_megatron.rollouts.errors import StoreError

FORMAT = "tio_megatron rollouts 1"
NOTHING = "0" * 64
"""What stands for the file before the first one."""
_KEY = "rollouts"
_FIELDS = ("format", "number", "before", "contents", "about")
_STORED = {"int64": "I64", "int32": "I32", "float32": "F32", "float64": "F64"}


@dataclass(frozen=True)
class Head:
    """What a file says without its arrays: its number, the digest of the file before, that of its contents, where it comes from, how much is in it."""

    number: int
    before: str
    contents: str
    about: About
    sequences: int


def encode(batch: Batch, number: int, before: str) -> bytes:
    """The bytes of the file."""
    arrays = {name: getattr(batch, name) for name in ARRAYS if getattr(batch, name) is not None}
    about = batch.about.to_json()
    said = {"format": FORMAT, "number": number, "before": before, "contents": _digest(batch, number, before, about), "about": about}
    return save(arrays, metadata={_KEY: json.dumps(said)})  # one entry: safetensors writes several in any order


def decode(raw: bytes, where: str) -> tuple[Head, Batch]:
    """Read a file and check its contents against its own digest.

    Raises:
        StoreError: damaged, cut off, edited, or something else.
    """
    try:
        header = parse_header(raw[:8], raw[8:], len(raw), where)
    except ValueError as error:
        raise StoreError(str(error)) from None
    head = _head(header, len(raw), where)
    try:
        held = load(raw)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where}: damaged ({cut(str(error))})") from None
    arrays = {name: held.get(name) for name in ARRAYS}
    try:
        batch = Batch(head.about, **arrays)
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from None
    found = _digest(batch, head.number, head.before, head.about.to_json())
    if found != head.contents:
        raise StoreError(f"{where}: its contents have the digest {found[:16]}, the file says {head.contents[:16]}: damaged, or edited")
    return head, batch


def read_head(path: Path) -> Head:
    """The head of a file, without reading its arrays.

    Raises:
        StoreError: as :func:`decode`, as far as the head goes.
    """
    try:
        header, _, size = read_header(path)
    except ValueError as error:
        raise StoreError(str(error)) from None
    return _head(header, size, str(path))


def file_digest(raw: bytes) -> str:
    """The link of the chain: SHA-256 of the whole file."""
    return hashlib.sha256(raw).hexdigest()


def _head(header: dict[str, Any], size: int, where: str) -> Head:
    metadata: Any = header.pop("__metadata__", None)
    try:
        said = read_json(metadata[_KEY])
    except (ValueError, RecursionError, KeyError, TypeError):
        said = None
    if not isinstance(said, dict) or said.get("format") != FORMAT or said.keys() != set(_FIELDS):
        raise StoreError(f"{where}: not a batch of the format {FORMAT!r}")
    stored = {name: _STORED[np.dtype(dtype).name] for name, dtype in ARRAYS.items()}
    wrong = sorted(header.keys() - ARRAYS.keys()) + [name for name in ARRAYS if name not in header and name not in OPTIONAL]
    wrong += [name for name, entry in header.items() if name in stored and (not isinstance(entry, dict) or entry.get("dtype") != stored[name])]
    if wrong:
        raise StoreError(f"{where}: {shown(wrong[0])} is unknown, missing, or of another type than {FORMAT!r} has")
    shape = header["lengths"].get("shape")
    typed = type(said["number"]) is int and all(isinstance(said[name], str) for name in ("before", "contents", "about"))
    if not (typed and isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and 0 < shape[0] <= size):
        raise StoreError(f"{where}: a damaged header (lengths of the shape {shown(shape)}, number {shown(said['number'])})")
    return Head(said["number"], said["before"], said["contents"], About.from_json(said["about"], where), shape[0])


def _digest(batch: Batch, number: int, before: str, about: str) -> str:
    made = hashlib.sha256(json.dumps([FORMAT, number, before, about]).encode())
    for name, dtype in ARRAYS.items():
        array = getattr(batch, name)
        made.update(f"{name} {-1 if array is None else len(array)};".encode())
        if array is not None:
            made.update(np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
    return made.hexdigest()
