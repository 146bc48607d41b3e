"""Recordings as arrays, in npz or safetensors: ours (:class:`tio_megatron.verify.recording.Recording`), and plain tables.

Ours: ``lengths`` [B], ``tokens`` [sum of lengths], ``logprobs`` [sum of (length - 1)], sequences end to end. A batch of a store of rollouts: the same
with ``prompts`` [B] and ``logprobs`` [sum of (length - prompt)]. A table: ``tokens`` (or another name of
token ids) [B, S] and ``logprobs`` [B, S] or [B, S - 1], with ``lengths`` [B] or ``mask`` [B, S] if rows are padded.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tio_megatron.files.safe_file import SafeFile
from tio_megatron.findings.messages import cut, named, shown
from tio_megatron.verify.readers.scored import LOGPROB_FIELDS, TOKEN_FIELDS, Scored, require_no_padding

DAMAGE = (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, SyntaxError, OverflowError, MemoryError, zlib.error, zipfile.BadZipFile)
"""What zipfile and numpy raise of a damaged file (RuntimeError: it is encrypted, or of an unknown kind; MemoryError: numpy's parser of a header)."""


class _Flat(Protocol):
    """An array that is read from its start to its end."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def take(self, count: int) -> npt.NDArray[np.generic]:
        """The next ``count`` elements, flat."""


class _Member:
    """One array of an npz file, streamed."""

    def __init__(self, archive: zipfile.ZipFile, name: str, where: str) -> None:
        self.where = f"{where}, array {name!r}"
        try:
            self.file = archive.open(f"{name}.npy")
            version = np.lib.format.read_magic(self.file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self.dtype = read(self.file)
        except DAMAGE as error:
            raise ValueError(f"{self.where}: no numpy array ({cut(str(error))})") from None
        announced = archive.getinfo(f"{name}.npy").file_size
        if math.prod(self.shape) * self.dtype.itemsize > announced:
            raise ValueError(f"{self.where}: {list(self.shape)} of {self.dtype} in {announced} bytes: damaged")
        if self.dtype.hasobject:
            raise ValueError(f"{self.where}: holds Python objects, which are pickled and not read")
        if fortran and len(self.shape) > 1:
            raise ValueError(f"{self.where}: stored column by column; save it in C order")

    def take(self, count: int) -> npt.NDArray[np.generic]:
        need = count * self.dtype.itemsize
        try:
            raw = self.file.read(need)
        except DAMAGE as error:
            raise ValueError(f"{self.where}: damaged ({error})") from None
        if len(raw) != need:
            raise ValueError(f"{self.where}: ends early")
        return np.frombuffer(raw, dtype=self.dtype)


def read_npz(path: Path, field: str | None) -> Iterator[Scored]:
    """See :func:`tio_megatron.verify.readers.read_scored`."""
    try:
        archive = zipfile.ZipFile(path)
    except DAMAGE as error:
        raise ValueError(f"{path}: a damaged or cut off npz file ({error})") from None
    with archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        yield from _sequences({name: _Member(archive, name, str(path)) for name in names if _known(name, field)}, field, str(path), names)


def read_safetensors(path: Path, field: str | None) -> Iterator[Scored]:
    """See :func:`tio_megatron.verify.readers.read_scored`."""
    with SafeFile(path) as file:
        names = list(file.entries)
        yield from _sequences({name: file.stream(name) for name in names if _known(name, field)}, field, str(path), names)


def _known(name: str, field: str | None) -> bool:
    return name == field or name in (*LOGPROB_FIELDS, *TOKEN_FIELDS, "lengths", "prompts", "mask")


def _sequences(arrays: Mapping[str, _Flat], field: str | None, where: str, names: list[str]) -> Iterator[Scored]:
    values = [name for name in ((field,) if field else LOGPROB_FIELDS) if name in arrays]
    ids = next((name for name in TOKEN_FIELDS if name in arrays), None)
    if len(values) > 1:
        raise ValueError(f"{where}: several log-probabilities ({', '.join(values)}); choose one by name (--field-a, --field-b)")
    if not values or ids is None:
        wanted = field or "/".join(LOGPROB_FIELDS)
        raise ValueError(f"{where}: needs token ids ({'/'.join(TOKEN_FIELDS)}) and log-probabilities ({wanted}); it has {named(names) or 'no array'}")
    tokens, logprobs = arrays[ids], arrays[values[0]]
    if len(tokens.shape) == 1:
        yield from _end_to_end(tokens, logprobs, arrays, where)
    elif len(tokens.shape) == 2 and len(logprobs.shape) == 2:
        yield from _table(tokens, logprobs, arrays, where)
    else:
        raise ValueError(
            f"{where}: {ids} has the shape {shown(list(tokens.shape))} and {values[0]} {shown(list(logprobs.shape))}; one or two axes were expected"
        )


def _lengths(arrays: Mapping[str, _Flat], where: str) -> list[int]:
    shape = arrays["lengths"].shape
    if len(shape) != 1:
        raise ValueError(f"{where}: lengths has the shape {list(shape)}; [B] was expected")
    found = [int(length) for length in arrays["lengths"].take(shape[0])]
    wrong = next((index for index, length in enumerate(found) if length < 1), None)
    if wrong is not None:
        raise ValueError(f"{where}: sequence {wrong} has the length {found[wrong]}; 1 or more was expected")
    return found


def _end_to_end(tokens: _Flat, logprobs: _Flat, arrays: Mapping[str, _Flat], where: str) -> Iterator[Scored]:
    lengths = _lengths(arrays, where) if "lengths" in arrays else [tokens.shape[0]]
    total = sum(lengths)
    if tokens.shape != (total,):
        raise ValueError(f"{where}: the lengths add up to {total}, there are {tokens.shape[0]} tokens")
    given = logprobs.shape[0] if len(logprobs.shape) == 1 else -1
    ways = [[0] * len(lengths), [1] * len(lengths)]
    if "prompts" in arrays and arrays["prompts"].shape == (len(lengths),):
        ways.append([int(count) for count in arrays["prompts"].take(len(lengths))])
    unscored = next((way for way in ways if given == total - sum(way)), None)
    if unscored is None or any(not 0 <= count <= length for count, length in zip(unscored, lengths, strict=True)):
        raise ValueError(f"{where}: {list(logprobs.shape)} log-probabilities for {total} tokens in {len(lengths)} sequences")
    for index, (length, missing) in enumerate(zip(lengths, unscored, strict=True)):
        yield Scored(_ids(tokens, length, where), logprobs.take(length - missing).astype(np.float32), f"{where}, sequence {index}")


def _table(tokens: _Flat, logprobs: _Flat, arrays: Mapping[str, _Flat], where: str) -> Iterator[Scored]:
    rows, width = tokens.shape
    if logprobs.shape not in ((rows, width), (rows, width - 1)):
        raise ValueError(f"{where}: log-probabilities {list(logprobs.shape)} for tokens {[rows, width]}")
    mask = arrays.get("mask")
    if mask is not None and mask.shape != (rows, width):
        raise ValueError(f"{where}: mask {list(mask.shape)} for tokens {[rows, width]}")
    lengths = _lengths(arrays, where) if "lengths" in arrays else [width] * rows
    if len(lengths) != rows or any(length > width for length in lengths):
        raise ValueError(f"{where}: {len(lengths)} lengths from {min(lengths, default=0)} to {max(lengths, default=0)} for {rows} rows of {width}")
    missing = width - logprobs.shape[1]
    for index, length in enumerate(lengths):
        line, values = _ids(tokens, width, where)[:length], logprobs.take(width - missing).astype(np.float32)[: length - missing]
        if mask is not None:
            chosen = mask.take(width).astype(bool)[:length]
            line, values = line[chosen], values[chosen[missing:]]
        elif "lengths" not in arrays:
            require_no_padding(line, values, f"{where}, sequence {index}")
        yield Scored(line, values, f"{where}, sequence {index}")


def _ids(tokens: _Flat, count: int, where: str) -> npt.NDArray[np.int64]:
    values = tokens.take(count)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{where}: token ids of type {values.dtype}; integers were expected")
    return values.astype(np.int64)
