"""Writing a trace: a folder of safetensors and JSON. Digests stay in memory (12 bytes a token and point), kept tensors go to mapped files at once.

trace.json            header: format, engine, facts, points, weights. Written last: without it a trace is unfinished.
rows.safetensors      tokens, sequence [T]; call, batch, padding [T]: the forward pass of a token, its tokens, how many of them were padding;
                      for each point ``POINT`` [T] int64 digests, ``POINT#squares`` [T] fp32, the row's sum of squares,
                      and ``POINT#columns`` [T] int32, how many columns of the row are in the digest
values/POINT.safetensors    the tensor [T, ...], where it was kept
weights/NAME.safetensors    the parameter, where it was kept; sketches.safetensors: some elements of every parameter
progress.json         how far the run has come, rewritten at every point
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tio_megatron.files.whole import drafted, naming, write_whole
from tio_megatron.traces.digest import row_digests, tensor_digest

FORMAT, VERSION = "tio-trace", 1
NAME = re.compile(r"\w[\w.-]*")
"""Names of points and parameters: they become names of files."""

SKETCH = 512
"""Elements kept of every parameter, at equal distances."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32"}
_PROGRESS = 512


class TraceWriter:
    """One trace, or one rank's part of it. Use as a context manager: leaving it without an error finishes the trace.

    Args:
        folder: to make; must not hold a trace.
        sequences: token ids; row ``i`` of every point is the ``i``-th token of all sequences end to end.
        engine: who ran the model ("hf", "megatron", "vllm", or your own word).
        shape: ``layers``, ``moe`` (list of booleans), ``tied``, ``architecture`` where it is described, and further sizes for the report.
        facts: what may matter for bytes and is no tensor (temperature, training, layout, versions).
        keep: whether the tensor of a point is kept, by its name; False for none, True for all.
        rank: of this process, where several write parts.
    """

    def __init__(
        self,
        folder: Path | str,
        sequences: Sequence[Sequence[int]],
        *,
        engine: str,
        shape: dict[str, Any],
        facts: dict[str, Any] | None = None,
        keep: bool | Callable[[str], bool] = False,
        rank: int = 0,
    ) -> None:
        self.folder = Path(folder)
        if (self.folder / "trace.json").exists():
            raise ValueError(f"{folder}: there is a trace already")
        if not sequences or any(not len(sequence) for sequence in sequences):
            raise ValueError("a trace needs at least one sequence, each of at least one token")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lengths = [len(sequence) for sequence in sequences]
        self.tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
        self.engine, self.shape, self.facts, self.rank = engine, dict(shape), dict(facts or {}), rank
        self.keeps: Callable[[str], bool] = keep if callable(keep) else lambda name: bool(keep)
        self.passes = {name: np.zeros(len(self.tokens), dtype=np.int32) for name in ("call", "batch", "padding")}
        self.calls = 0
        self.points: dict[str, dict[str, Any]] = {}
        self.weights: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._squares: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._columns: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._sketches: dict[str, torch.Tensor] = {}
        self._progress = os.open(self.folder / "progress.json", os.O_WRONLY | os.O_CREAT, 0o644)
        self._seen = 0
        self.progress("start", 0)

    def progress(self, point: str, rows: int) -> None:
        """Note that ``point`` was reached with ``rows`` tokens: what is left of a run that hangs. Cheap: one write of 512 bytes."""
        self._seen = max(self._seen, rows)
        line = json.dumps({"rank": self.rank, "point": point, "rows": rows, "most_rows": self._seen})
        os.pwrite(self._progress, line.ljust(_PROGRESS).encode()[:_PROGRESS], 0)

    def forward(self, places: torch.Tensor) -> None:
        """A forward pass over these tokens begins ([n] row numbers, -1 for padding)."""
        self.calls += 1
        real = places[places >= 0].cpu().numpy()
        for name, value in (("call", self.calls), ("batch", len(places)), ("padding", len(places) - len(real))):
            self.passes[name][real] = value

    def put(self, name: str, rows: torch.Tensor, at: torch.Tensor, *, columns: int | torch.Tensor | None = None, width: Sequence[int] | None = None) -> None:
        """Record ``rows`` [n, ...] of the point ``name`` for the tokens ``at`` [n] (row numbers of the trace; -1 is padding and left out).

        Args:
            name: see :mod:`tio_megatron.models.points`; other names are kept too, and compared after all known ones.
            rows: any device and type.
            at: [n] int64.
            columns: where a row is only a part, its first column of the whole flattened row (one number, or one per row); None for whole rows.
            width: shape of a whole row, needed with ``columns``.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r}: a point's name is made of letters, digits, '.', '-' and '_'")
        self.progress(name, len(rows))
        real = at >= 0
        if not bool(real.all()):
            rows, at = rows[real.to(rows.device)], at[real]
            columns = columns[real.to(columns.device)] if isinstance(columns, torch.Tensor) else columns
        shape = tuple(width) if width is not None else tuple(rows.shape[1:])
        total = math.prod(shape)
        part = rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))
        if name not in self.points:
            self.points[name] = {"dtype": str(rows.dtype).removeprefix("torch."), "shape": list(shape), "largest": 0.0, "nonfinite": 0}
            self._digests[name] = np.zeros(len(self.tokens), dtype=np.int64)
            self._squares[name] = np.zeros(len(self.tokens), dtype=np.float32)
            self._columns[name] = np.zeros(len(self.tokens), dtype=np.int32)
            if self.keeps(name):
                self._kept[name] = self._mapped("values", name, (len(self.tokens), *shape), rows.dtype)
        elif list(shape) != self.points[name]["shape"]:
            raise ValueError(f"{name}: rows of {list(shape)}, earlier ones were {self.points[name]['shape']}")
        if not len(rows):
            return
        found = row_digests(part, 0 if columns is None else columns, total).cpu().numpy()
        if part.is_floating_point():
            norms = torch.linalg.vector_norm(part, dim=1, dtype=torch.float32)
            squares = norms.square().cpu().numpy()
        else:
            squares = part.to(torch.float32).square().sum(dim=1).cpu().numpy()
        places = at.cpu().numpy()
        if columns is None:
            self._digests[name][places], self._squares[name][places], self._columns[name][places] = found, squares, total
        else:
            with np.errstate(over="ignore"):
                np.add.at(self._digests[name], places, found)
            np.add.at(self._squares[name], places, squares)
            np.add.at(self._columns[name], places, part.shape[1])
        stats = self.points[name]
        bad = int((~np.isfinite(squares)).sum())
        stats["nonfinite"] += bad  # rows
        if part.numel() and not bad:
            low, high = part.aminmax()
            stats["largest"] = max(stats["largest"], abs(float(low)), abs(float(high)))
        if name in self._kept:
            self._store(self._kept[name].view(len(self.tokens), total), part, at.cpu(), columns)

    def weight(self, name: str, whole: torch.Tensor) -> None:
        """Record the parameter ``name`` (HF name, unsharded); kept whole where ``keep`` says so for its name."""
        whole = whole.detach()
        flat = whole.reshape(-1)
        entry: dict[str, Any] = {"dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape), "digest": tensor_digest(whole)}
        entry["rounded"] = tensor_digest(whole.to(torch.bfloat16))
        if whole.dim() == 2:
            entry["transposed"] = tensor_digest(whole.t().contiguous())
        self._sketches[name] = flat[_places(flat.numel())].to(torch.float32).cpu().clone()
        self.weights[name] = entry
        if self.keeps(name):
            self._mapped("weights", name, tuple(whole.shape), whole.dtype).copy_(whole.cpu())

    def finish(self) -> None:
        """Write what is in memory; the header comes last."""
        arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": self.tokens, **self.passes}
        arrays["sequence"] = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        for name in self.points:
            arrays[name], arrays[f"{name}#squares"] = self._digests[name], self._squares[name]
            arrays[f"{name}#columns"] = self._columns[name]
        write_arrays(self.folder / "rows.safetensors", arrays)
        if self._sketches:
            write_arrays(self.folder / "sketches.safetensors", {name: sketch.numpy() for name, sketch in self._sketches.items()})
        header = {
            "format": FORMAT,
            "version": VERSION,
            "engine": self.engine,
            "rank": self.rank,
            "lengths": self.lengths,
            "shape": self.shape,
            "facts": self.facts,
            "points": self.points,
            "weights": self.weights,
            "kept": sorted(self._kept),
        }
        write_whole(self.folder / "trace.json", json.dumps(header).encode())
        self.close()

    def close(self) -> None:
        """Let go of files; without :meth:`finish` before it the trace stays unfinished."""
        if self._progress >= 0:
            os.close(self._progress)
            self._progress = -1

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def _mapped(self, folder: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose memory is the data of a new safetensors file; zeros to begin with, and no memory until written."""
        if dtype not in _NAMES:
            dtype = torch.float32 if dtype.is_floating_point else torch.int64
        path = self.folder / folder / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        size = math.prod(shape) * dtype.itemsize
        start = write_header(path, {name: (_NAMES[dtype], shape, size)})
        if not size:
            return torch.zeros(shape, dtype=dtype)
        whole = np.memmap(path, dtype=np.uint8, mode="r+", offset=start, shape=(size,))
        return torch.from_numpy(whole).view(dtype).view(shape)

    @staticmethod
    def _store(kept: torch.Tensor, part: torch.Tensor, at: torch.Tensor, columns: int | torch.Tensor | None) -> None:
        part = part.to("cpu", kept.dtype)
        if columns is None:
            kept[at] = part
        elif isinstance(columns, int):
            kept[at, columns : columns + part.shape[1]] = part
        else:
            kept[at[:, None], columns.cpu()[:, None] + torch.arange(part.shape[1])] = part


def _places(numel: int) -> torch.Tensor:
    return torch.linspace(0, max(0, numel - 1), min(SKETCH, numel), dtype=torch.float64).round().to(torch.int64)


def write_header(path: Path, entries: dict[str, tuple[str, tuple[int, ...], int]]) -> int:
    """Make a safetensors file of (type, shape, bytes) whose data is 0; returns where the data starts (a multiple of 64).

    The disk's blocks are taken at once: memory mapped to a file that the disk then has no space for would end the process without a word.

    Raises:
        OSError: the disk has no space for the data; names the file.
    """
    header: dict[str, Any] = {}
    at = 0
    for name, (kind, shape, size) in entries.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + at)
    return 8 + len(text)


def write_arrays(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """A safetensors file, array by array; whoever reads ``path`` finds all of it or nothing. 8-byte types come first, so all lie aligned."""
    names = {"int64": "I64", "int32": "I32", "float32": "F32"}
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    with drafted(path) as draft:
        start = write_header(draft, {name: (names[str(arrays[name].dtype)], arrays[name].shape, arrays[name].nbytes) for name in order})
        with draft.open("r+b") as file:
            file.seek(start)
            for name in order:
                file.write(np.ascontiguousarray(arrays[name]).data)
