"""Reading an HF folder: one file or shards with an index, tensor by tensor, only the bytes asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tio_megatron.checkpoint.config import CheckpointConfig, CheckpointError
from tio_megatron.checkpoint.digest import tensor_digest
from tio_megatron.files.safetensors_header import read_header
from tio_megatron.files.strict_json import read_json
from tio_megatron.findings.messages import cut, shown
from tio_megatron.models import TensorSpec, tensor_count, tensor_table, tied_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"BF16": "bfloat16", "F32": "float32"}
_SHOWN = 6
_OLDER = "the file is damaged, or the training that wrote it had diverged: copy it again, or take an older checkpoint"


class Checkpoint:
    """An HF folder, checked when it is opened; tensors are read when asked for.

    Use as a context manager, or call :meth:`close`.

    Args:
        path: folder with ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index.json``.

    Raises:
        CheckpointError: the configuration is not covered, or files or tensors are missing, extra, or of another shape or dtype.
    """

    def __init__(self, path: Path | str) -> None:
        if not isinstance(path, str | Path):
            raise CheckpointError(f"checkpoint: the folder is {shown(path)}; expected its path as text or a pathlib.Path")
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder; a checkpoint is an HF folder with config.json and *.safetensors")
        self._open: dict[str, Any] = {}
        self.config = CheckpointConfig.from_file(self.path / "config.json")
        self._files = self._locate()
        try:
            self.table: dict[str, TensorSpec] = self._table()
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files, sorted."""
        return tuple(sorted(set(self._files.values())))

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, in the dtype it is stored in.

        Raises:
            KeyError: the model has no such tensor.
            CheckpointError: it has a NaN or an infinity.
        """
        return self.part(name)

    def part(self, name: str, axis: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements ``[start, stop)`` along ``axis`` of a tensor; only their bytes are read when ``axis`` is 0.

        Raises:
            KeyError: the model has no such tensor.
            CheckpointError: a NaN or an infinity is among them.
            ValueError: the tensor has no such elements; safetensors would give fewer.
        """
        shape = self.table[name].shape  # a KeyError here names the tensor, where safetensors would name only its file
        if axis is not None:
            require_window(name, shape, axis, start, stop)
        handle = self._handle(self._files[name])
        if axis is None:
            return self._sound(name, handle.get_tensor(name))
        window = handle.get_slice(name)
        return self._sound(name, window[start:stop] if axis == 0 else window[:, start:stop])

    def require_values(self, *, least: float | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Read tensors and refuse values that cannot be, before anything is changed by them.

        Args:
            least: no value may be below it.
            share: (which, of how many) parts of the tensors, for ranks that divide the work.

        Raises:
            CheckpointError: a NaN, an infinity, or a value below ``least``.
        """
        for name in [*self.table][share[0] :: share[1]]:
            tensor = self.tensor(name)
            if least is not None and tensor.numel() and float(lowest := tensor.min()) < least:
                where = self.path / self._files[name]
                raise CheckpointError(f"{where}: {name} has the value {float(lowest):g}, no value of it can be below {least:g}; {_OLDER}")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, in the order of the model, one in memory at a time."""
        for name in self.table:
            yield name, self.tensor(name)

    def digests(self) -> dict[str, str]:
        """The manifest: HF name -> digest of the whole tensor."""
        return {name: tensor_digest(tensor) for name, tensor in self.tensors()}

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _sound(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """``values``, all finite. Smallest and largest are found at the speed of memory and keep what is not finite."""
        if values.numel() and not all(math.isfinite(float(end)) for end in torch.aminmax(values)):
            odd = ~torch.isfinite(values)
            first = odd.nonzero()[0].tolist()
            where = f"{self.path / self._files[name]}: {name}"
            raise CheckpointError(f"{where} has {int(odd.sum())} values that are NaN or infinite (of those read, the first is at {first}); {_OLDER}")
        return values

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.path / file
            try:
                read_header(path)  # the library takes one of two tensors of one name
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path}: no such file") from error
            except ValueError as error:
                raise CheckpointError(f"{error}; copy it again") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file ({cut(str(error))}); copy it again") from error
        return self._open[file]

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or the single file."""
        index = self.path / INDEX
        if index.exists():
            try:
                files = read_json(index.read_text(encoding="utf-8"))["weight_map"]
            except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index}: cannot be read as an index with a weight_map ({cut(repr(error))})") from error
            odd = [f for f in files.values() if not _is_plain(f)] if isinstance(files, dict) else [files]
            if odd:
                raise CheckpointError(f"{index}: weight_map must map tensor names to file names in the same folder, it has {shown(odd[0])}")
            missing = sorted({f for f in files.values() if not (self.path / f).is_file()})
            if missing:
                raise CheckpointError(f"{self.path}: the index names {len(set(files.values()))} shards, missing are {_some(missing)}; copy them too")
            return files
        if not (self.path / SINGLE).is_file():
            found = sorted(p.name for p in self.path.glob("*.bin"))
            hint = f" (found {found[0]}: convert it to safetensors)" if found else ""
            raise CheckpointError(f"{self.path}: neither {SINGLE} nor {INDEX}{hint}")
        return {name: SINGLE for name in self._handle(SINGLE).keys()}

    def _table(self) -> dict[str, TensorSpec]:
        """What the files must hold; sizes that no such files can have are refused before every name is made."""
        count, shape = tensor_count(self.config.shape), self.config.shape
        if count > 10_000 + 8 * len(self._files):
            sizes = f"{shape.layers} layers{f' of {shape.experts} experts' if shape.experts else ''}"
            raise CheckpointError(f"{self.path}: config.json asks for {sizes}, {count} tensors; the files hold {len(self._files)}")
        return tensor_table(shape)

    def _check(self) -> None:
        found = set(self._files)
        self._drop_tied_head(found)
        problems = []
        missing = [name for name in self.table if name not in found]
        if missing:
            problems.append(f"{len(missing)} tensors missing: {_some(missing)}")
        extra = sorted(found - self.table.keys())
        if extra:
            problems.append(f"{len(extra)} tensors the model has no place for: {_some(extra)}")
        wrong: list[str] = []
        dtypes: dict[str, str] = {}
        held = {file: set(self._handle(file).keys()) for file in self.files}
        for name, spec in self.table.items():
            if name not in found:
                continue
            if name not in held[self._files[name]]:
                problems.append(f"{self._files[name]} lacks {name}, which the index places there")
                continue
            window = self._handle(self._files[name]).get_slice(name)
            dtypes.setdefault(str(window.get_dtype()), name)
            if tuple(window.get_shape()) != spec.shape:
                wrong.append(f"{name} is {list(window.get_shape())}, config.json makes it {list(spec.shape)}")
        if wrong:
            problems.append(f"{len(wrong)} tensors of another shape: {_some(wrong)}")
        expected = next(key for key, value in _DTYPES.items() if value == self.config.dtype)
        other = [f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()) if dtype != expected]
        if other:
            problems.append(f"config.json says dtype {self.config.dtype}, but {_some(other)}")
        if problems:
            raise CheckpointError(f"{self.path}: " + "; ".join(problems))

    def _drop_tied_head(self, found: set[str]) -> None:
        """A tied model may store its head too, if it is the embedding's bytes."""
        for head, embedding in tied_tensors(self.config.shape).items():
            if {head, embedding} <= found:
                ours, theirs = (self._handle(self._files[name]).get_tensor(name) for name in (head, embedding))
                if tensor_digest(ours) == tensor_digest(theirs):
                    found.discard(head)


def require_window(name: str, shape: tuple[int, ...], axis: int, start: int, stop: int | None) -> None:
    """Refuse elements ``[start, stop)`` along ``axis`` that a tensor of ``shape`` does not have.

    Raises:
        ValueError: names the tensor.
    """
    if type(axis) is not int or not 0 <= axis < min(len(shape), 2):
        raise ValueError(f"{name}: axis is {shown(axis)}, a part of {list(shape)} is taken along {list(range(len(shape)))}")
    last = shape[axis] if stop is None else stop
    if type(start) is not int or type(last) is not int or not 0 <= start <= last <= shape[axis]:
        raise ValueError(f"{name}: elements [{shown(start)}, {shown(last)}) along axis {axis} are asked for, it has [0, {shape[axis]})")


def _is_plain(name: object) -> bool:
    """Whether it is the name of a file of the folder itself, of a length that files may have."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and len(name) <= 200 and name.isprintable()


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(cut(name, 200) for name in names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
