"""Reading a trace: the header, then only what is asked for. Nothing is executed or unpickled; damaged and foreign files get a precise message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tio_megatron.files.safe_file import SafeFile
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import cut, shown
from tio_megatron.models import SCALED, Point, points
from tio_megatron.traces.writer import FORMAT, NAME, VERSION

PASSES = ("call", "batch", "padding")
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32}


@dataclass(frozen=True)
class Unfinished:
    """A trace whose run never ended: per rank the last point it reached, the tokens it had there, and the most it ever had in one pass."""

    folder: Path
    ranks: tuple[dict[str, Any], ...]


class Trace:
    """A finished trace; see :class:`tio_megatron.traces.writer.TraceWriter` for the files.

    Raises:
        ValueError: no trace, one of another version, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "trace.json"
        try:
            header = read_json(path.read_text())
        except (ValueError, OSError, RecursionError) as error:
            raise ValueError(f"{path}: no header of a trace ({error})") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f"{path}: some other JSON, not the header of a trace")
        if header.get("version") != VERSION:
            raise ValueError(f"{path}: a trace of version {shown(header.get('version'))}; this package reads version {VERSION}")
        try:
            self.engine: str = header["engine"]
            self.lengths: list[int] = [int(n) for n in header["lengths"]]
            if min(self.lengths, default=1) < 1:
                raise ValueError(f"sequence {self.lengths.index(min(self.lengths))} has the length {min(self.lengths)}")
            self.shape: dict[str, Any] = header["shape"]
            self.facts: dict[str, Any] = header["facts"]
            self.recorded: dict[str, dict[str, Any]] = header["points"]
            self.weights: dict[str, dict[str, Any]] = header["weights"]
            self.kept: set[str] = set(header["kept"])
            known = [point.name for point in self._points()]
            odd = [name for name in (*self.recorded, *self.weights, *self.kept) if not NAME.fullmatch(name)]
            if odd:
                raise ValueError(f"{shown(odd[0])} is no name of a point or a parameter")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"{path}: a damaged header of a trace ({type(error).__name__}: {cut(str(error))})") from None
        if not (folder / "rows.safetensors").is_file():
            raise ValueError(f"{folder}: rows.safetensors is missing")
        self._rows = SafeFile(folder / "rows.safetensors")
        total = sum(self.lengths)
        parts = [f"{name}{part}" for name in self.recorded for part in ("", "#squares", "#columns")]
        missing = [name for name in ("tokens", "sequence", *PASSES, *parts) if name not in self._rows.entries]
        if missing or any(entry.shape[:1] != (total,) for entry in self._rows.entries.values()):
            raise ValueError(f"{folder}/rows.safetensors does not fit trace.json: {missing[:3] or f'rows of another number than {total}'}")
        for file in (folder / "sketches.safetensors", *sorted((folder / "values").glob("*.safetensors")), *sorted((folder / "weights").glob("*.safetensors"))):
            if file.is_file():  # a comparison may not come to read them: what is cut off is said all the same
                SafeFile(file).close()
        self.names = [name for name in known if name in self.recorded] + sorted(set(self.recorded) - set(known))

    @property
    def graph(self) -> list[Point]:
        """The points of this model, recorded or not (those of rows weighted early only if they are); then those with names of their own."""
        known = [point for point in self._points() if point.part not in SCALED or point.name in self.recorded]
        names = {point.name for point in known}
        return known + [Point(name, "unknown") for name in self.names if name not in names]

    def _points(self) -> Iterator[Point]:
        shape = self.shape
        return points(int(shape["layers"]), shape["moe"], tied=bool(shape.get("tied")), architecture=str(shape.get("architecture", "")))

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[T] token ids."""
        found: npt.NDArray[np.int64] = self._rows.values("tokens")
        return found

    @cached_property
    def passes(self) -> dict[str, npt.NDArray[np.int32]]:
        """[T] each: ``call``, the forward pass that computed a token; ``batch``, all its tokens; ``padding``, how many of them were padding."""
        return {name: self._rows.values(name) for name in PASSES}

    def where(self, row: int) -> tuple[int, int]:
        """(sequence, position) of a row."""
        ends = np.cumsum(self.lengths)
        sequence = int(np.searchsorted(ends, row, side="right"))
        return sequence, row - int(ends[sequence - 1] if sequence else 0)

    def digests(self, name: str) -> npt.NDArray[np.int64]:
        """[T] digests of a point; mapped."""
        found: npt.NDArray[np.int64] = self._rows.raw(name)
        return found

    def squares(self, name: str) -> npt.NDArray[np.float32]:
        """[T] sums of squares of a point's rows."""
        found: npt.NDArray[np.float32] = self._rows.raw(f"{name}#squares")
        return found

    def columns(self, name: str) -> npt.NDArray[np.int32]:
        """[T] how many columns of each row were recorded; 0 where a token was not seen at this point."""
        found: npt.NDArray[np.int32] = self._rows.raw(f"{name}#columns")
        return found

    def values(self, name: str) -> torch.Tensor | None:
        """The tensor [T, ...] of a point, mapped, or None where it was not kept."""
        return self._tensor("values", name) if name in self.kept else None

    def weight(self, name: str) -> torch.Tensor | None:
        """The parameter, mapped, or None where it was not kept."""
        return self._tensor("weights", name) if (self.folder / "weights" / f"{name}.safetensors").is_file() else None

    @cached_property
    def sketches(self) -> dict[str, npt.NDArray[np.float32]]:
        """Some elements of every parameter, at the same places on both sides."""
        path = self.folder / "sketches.safetensors"
        if not path.is_file():
            return {}
        with SafeFile(path) as file:
            return {name: file.values(name) for name in file.entries}

    def close(self) -> None:
        """Let the mappings go."""
        self._rows.close()

    def _tensor(self, folder: str, name: str) -> torch.Tensor:
        path = self.folder / folder / f"{name}.safetensors"
        if not path.is_file():
            raise ValueError(f"{path} is missing, though trace.json names it")
        file = SafeFile(path)
        if list(file.entries) != [name]:
            raise ValueError(f"{path}: holds {list(file.entries)}, {name} was expected")
        raw = file.raw(name)
        dtype = _TORCH[file.entries[name].type]
        if not raw.size:
            return torch.zeros(raw.shape, dtype=dtype)
        return torch.from_numpy(np.array(raw).reshape(-1).view(np.uint8)).view(dtype).view(raw.shape)


def open_trace(folder: Path | str) -> Trace | Unfinished:
    """A trace, or what is left of a run that did not end (its ranks' parts lie in ``rank-0``, ``rank-1``, ...).

    Raises:
        ValueError: the folder holds neither.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; a trace is a folder with trace.json")
    if (folder / "trace.json").exists():
        return Trace(folder)
    found = []
    for path in sorted([folder / "progress.json", *folder.glob("rank-*/progress.json")]):
        if not path.is_file():
            continue
        try:
            entry = read_json(path.read_text())
            found.append({"rank": int(entry["rank"]), "point": str(entry["point"]), "rows": int(entry["rows"]), "most_rows": int(entry["most_rows"])})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
            raise ValueError(f"{path}: damaged ({cut(str(error))})") from None
    if not found:
        raise ValueError(f"{folder}: no trace (neither trace.json nor progress.json)")
    return Unfinished(folder, tuple(sorted(found, key=lambda entry: int(entry["rank"]))))
