"""A safetensors file read without loading it: header checked against the file, arrays mapped. bf16 comes as fp32, which holds it exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tio_megatron.files.safetensors_header import read_header
from tio_megatron.findings.messages import cut, shown

TYPES: dict[str, str] = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2",
    "I32": "<i4", "U32": "<u4", "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
"""safetensors' names of types, as numpy stores them."""

_MOST_AXES = 32


@dataclass(frozen=True)
class Entry:
    """One array: safetensors' name of its ``type``, ``shape``, and where its bytes begin in the file."""

    type: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class SafeFile:
    """Arrays of a safetensors file by name.

    Raises:
        ValueError: the file is cut off or something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, start, size = read_header(path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        try:
            self.entries = {name: _entry(found, start, size) for name, found in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}: a damaged safetensors header ({cut(str(error))})") from None
        self._map: np.memmap[Any, np.dtype[np.uint8]] | None = np.memmap(path, dtype=np.uint8, mode="r")

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The array as it is stored (bf16: its 16 bits), mapped and read-only."""
        entry = self.entries[name]
        dtype = np.dtype(TYPES[entry.type])
        assert self._map is not None, "the file was closed"
        found: npt.NDArray[Any] = self._map[entry.start : entry.start + entry.numel * dtype.itemsize].view(dtype).reshape(entry.shape)
        return found

    def values(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` along the first axis, copied, bf16 as fp32."""
        return widened(self.raw(name)[start:stop], self.entries[name].type)

    def stream(self, name: str) -> Stream:
        """For reading from start to end."""
        return Stream(self.raw(name), self.entries[name])

    def close(self) -> None:
        """Let the mapping go."""
        self._map = None

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Stream:
    """An array that is read in pieces."""

    def __init__(self, raw: npt.NDArray[Any], entry: Entry) -> None:
        self.shape, self._raw, self._type, self._at = entry.shape, raw.reshape(-1), entry.type, 0

    def take(self, count: int) -> npt.NDArray[Any]:
        """The next ``count`` elements."""
        piece = self._raw[self._at : self._at + count]
        self._at += count
        return widened(piece, self._type)


def widened(raw: npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
    """A copy; bf16 becomes fp32."""
    if kind == "BF16":
        wide = raw.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return np.array(raw)


def _entry(found: dict[str, Any], base: int, size: int) -> Entry:
    kind, shape = found["dtype"], tuple(found["shape"])
    start, stop = found["data_offsets"]
    if kind not in TYPES:
        raise ValueError(f"type {shown(kind)} is not known")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"an array of {len(shape)} axes; at most {_MOST_AXES} are read")
    if any(type(n) is not int or n >= 1 << 62 for n in (*shape, start, stop)):
        raise ValueError(f"an array of the shape {shown(found['shape'])} at {shown(found['data_offsets'])}, which are no sizes")
    if min(shape, default=0) < 0 or start < 0 or stop - start != math.prod(shape) * np.dtype(TYPES[kind]).itemsize:
        raise ValueError("an array's place does not fit its shape")
    if base + stop > size:
        raise ValueError(f"the file is cut off: it should have {base + stop} bytes and has {size}")
    return Entry(kind, shape, base + start)
