"""Folders of training checkpoints: written whole or not at all, the newest one named by a small file, every file under a SHA-256.

A root holds ``step-00000010`` and its like, and ``latest``, a file with the name of the newest. A folder gets its name when everything in it is
on the disk, and ``latest`` is replaced after that: whoever is killed leaves the old checkpoint or the new one. Nothing here is a pickle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tio_megatron.checkpoint.config import CheckpointError
from tio_megatron.checkpoint.training_fields import check_fields
from tio_megatron.files.strict_json import read_json
from tio_megatron.files.whole import sync, write_whole
from tio_megatron.findings.messages import LONGEST, cut, shown

STATE = "state.json"
LATEST = "latest"
FORMAT = "tio_megatron training checkpoint 2"
SPARE = 64 << 20
"""Bytes that must stay free on the disk."""
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")
_DRAFT = ".draft-"
_LOCK = ".lock"
_READ = ("config.json", "model.safetensors.index.json")


class TrainingDraft:
    """A training checkpoint being written: fill :attr:`path`, then :meth:`commit`. Use as a context manager; without a commit nothing stays.

    Args:
        root: the folder of checkpoints; made if it is not there.
        step: steps taken; part of the name.
        size: bytes that will be written, about.

    Raises:
        CheckpointError: another process is writing here, the disk is too small, or the system refuses.
    """

    def __init__(self, root: Path | str, step: int, size: int = 0) -> None:
        self.root, self.step = Path(root), step
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self.root}: cannot be written ({error})") from error
        try:
            self._begin(size)
        except BaseException:
            os.close(self._lock)
            raise

    def _begin(self, size: int) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{self.root}: another process is writing a checkpoint here; give each run a folder of its own") from error
        for stale in self.root.glob(f"{_DRAFT}*"):  # whoever made it is dead: the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        free = shutil.disk_usage(self.root).free
        if size + SPARE > free:
            raise CheckpointError(f"{self.root}: needs {(size + SPARE) / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on that disk; {self._kept()}")
        self.path = self.root / f"{_DRAFT}{self.step}-{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise self.failed(error) from error

    def commit(self, state: Mapping[str, Any]) -> Path:
        """Write ``state`` beside what lies in :attr:`path`, bring all to the disk, and make it the newest checkpoint.

        Raises:
            CheckpointError: the system refuses, or ``state`` could not be loaded; the checkpoints before are as they were.
        """
        try:
            files = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in _files(self.path)}
            contents = {"format": FORMAT, **state, "files": files}
            check_fields(f"{self.root}: the checkpoint of step {self.step} would not load", contents)
            text = json.dumps(contents | {"sha256": _own_digest(contents)}, indent=1, sort_keys=True)
            (self.path / STATE).write_text(text + "\n", encoding="utf-8")
            for folder, _, names in os.walk(self.path):
                for name in names:
                    sync(Path(folder) / name)
                sync(Path(folder))
            before = sorted(path for path in self.root.glob(f"step-{self.step:08d}*") if _NAME.fullmatch(path.name))
            target = self._free_name()
            self.path.rename(target)
            sync(self.root)
            write_whole(self.root / LATEST, (target.name + "\n").encode(), to_disk=True)
        except OSError as error:
            raise self.failed(error) from error
        for path in before:  # the same step, written before: nobody is pointed to it any more
            shutil.rmtree(path, ignore_errors=True)
        return target

    def failed(self, error: BaseException) -> CheckpointError:
        """``error`` as a refusal that says what is left."""
        return CheckpointError(f"{self.root}: the checkpoint of step {self.step} cannot be written ({error}); {self._kept()}")

    def close(self) -> None:
        """Remove what was not committed and let others write."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> TrainingDraft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _free_name(self) -> Path:
        """A folder cannot replace one that has files, so a step written twice gets another name."""
        name, again = f"step-{self.step:08d}", 0
        while (self.root / (f"{name}.{again}" if again else name)).exists():
            again += 1
        return self.root / (f"{name}.{again}" if again else name)

    def _kept(self) -> str:
        try:
            return f"the last good one is {_named(self.root)}"
        except CheckpointError:
            return "there is none before it"


def latest_training(path: Path | str) -> Path:
    """The newest checkpoint of a root; ``path`` itself if it is a checkpoint.

    Raises:
        CheckpointError: there is none, or ``latest`` names none.
    """
    path = Path(path)
    try:
        return _named(path)
    except CheckpointError as error:
        if not any(_steps(path)):
            raise
        raise CheckpointError(f"{error}; {whole_beside(path)}") from error


def whole_beside(root: Path, *, damaged: Path | None = None) -> str:
    """Which checkpoint of a root to take in place of one that is damaged: a sentence with the newest whole one. Reads all its bytes.

    Args:
        root: the folder of checkpoints.
        damaged: the one that is known to be damaged.
    """
    for folder in _steps(root):
        if folder == damaged:
            continue
        try:
            files = training_state(folder)["files"]
        except CheckpointError:
            continue
        if not damaged_files(folder, files) and not unlisted_files(folder, files):
            return f"{folder} is whole: load it by its folder"
    return "no other checkpoint beside it is whole"


def _steps(root: Path) -> Iterator[Path]:
    """The checkpoints of a root, newest first."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]
    yield from sorted(found, key=lambda path: [int(part) for part in path.name.removeprefix("step-").split(".")], reverse=True)


def _named(path: Path) -> Path:
    """The checkpoint that ``path`` is, or that its ``latest`` names.

    Raises:
        CheckpointError: there is none, or ``latest`` names none.
    """
    if (path / STATE).is_file():
        return path
    try:
        name = (path / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no training checkpoint here (neither {LATEST} nor {STATE})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / LATEST}: cannot be read ({error})") from error
    if not _NAME.fullmatch(name) or not (path / name / STATE).is_file():
        raise CheckpointError(f"{path / LATEST}: names {shown(name)}, which is no checkpoint beside it")
    return path / name


def training_state(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's ``state.json``, every field of which can be used. The other files are checked by :func:`damaged_files`.

    Raises:
        CheckpointError: it cannot be read, is not whole, was altered, has another format, or a field (named) is missing or cannot be.
    """
    path = folder / STATE
    try:
        data = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); the file is truncated or altered") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"{path}: format {shown(found)}, this version reads {FORMAT!r}")
    given = data.pop("sha256", None)
    try:
        altered = given != _own_digest(data)
    except RecursionError as error:
        raise CheckpointError(f"{path}: is nested too deeply ({error}); the file is altered") from error
    if altered:
        raise CheckpointError(f"{path}: it was altered (its own sha256 does not fit)")
    check_fields(str(path), data)
    return data


def unlisted_files(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """One line for each file of a checkpoint's folders that decides what is read from them (tensors, configuration, index) and is not in ``files``."""
    found = (name for name, path in _files(folder) if path.parent != folder and (path.suffix == ".safetensors" or path.name in _READ))
    return [f"{name} is not among the files that were written" for name in found if name not in files]


def damaged_files(folder: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None) -> list[str]:
    """One line for each file (of ``names``, or of all) that is missing, truncated or altered; reads all their bytes.

    Args:
        folder: the checkpoint.
        files: the entry ``files`` of its state.
        names: which of them.
    """
    lines = []
    for name in files if names is None else names:
        path, short = folder / name, cut(name, LONGEST)
        try:
            size, wanted = path.stat().st_size, files[name]["bytes"]
            if size != wanted:
                lines.append(f"{short} has {size} bytes, {wanted} were written")
            elif _sha256(path) != files[name]["sha256"]:
                lines.append(f"{short} was altered (its sha256 differs)")
        except FileNotFoundError:
            lines.append(f"{short} is missing")
        except OSError as error:
            lines.append(f"{short} cannot be read ({error.strerror or error})")
    return lines


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
