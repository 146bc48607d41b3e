"""Folders that a job writes to, looked at before anything is made: can they be written, are they free, and is the disk large enough."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tio_megatron.jobs.problems import InputProblem

MOST_MADE = 16
SPARED = 24 * 3600.0
FRESH = 2.0
"""Seconds in which a new folder may not be held yet."""
PATIENCE = 0.3
"""Seconds; another job that only looks whether a folder is free holds it for less."""


def require_writable(folder: Path, option: str) -> None:
    """Refuse a folder that is there and takes no file, or that could not be made; makes nothing.

    Raises:
        InputProblem: names the path in the way, and what would work.
    """
    there = _nearest(folder)
    if not there.is_dir():
        what = "is a file, not a folder" if there == folder.absolute() else f"cannot be made, {there} is a file"
        raise InputProblem(f"{option} {folder}: {what}; name a folder, or a path where one can be made")
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"\0" * 4096)
    except OSError as error:
        raise InputProblem(f"{option} {folder}: {there} cannot be written ({error.strerror or error}); name a folder that can") from error


def require_free(folder: Path) -> None:
    """Refuse a folder that another job has; makes nothing.

    Raises:
        InputProblem: as :func:`claimed` does.
    """
    if folder.is_dir():
        with _locked(folder):
            pass


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A folder, made if need be, for this process alone. The lock is the system's and leaves no file, so it is gone when the process is, killed or not.

    Raises:
        InputProblem: another job has the folder, or its file system keeps no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise InputProblem(f"{folder}: another job is writing there; wait until it has ended, or name another folder") from error
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL):
                    raise
                reason = error.strerror or error
                raise InputProblem(f"{folder}: its file system does not lock folders ({reason}); name a folder on a local disk") from error
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder of this process, removed at the end. One that a killed process has left behind is removed by the next call."""
    _remove_left_behind(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # where the file system keeps no locks nobody else removes it
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _remove_left_behind(parent: Path, prefix: str) -> None:
    """Remove the folders with ``prefix`` that nobody holds any longer. Not one that was made in these seconds."""
    for folder in parent.glob(f"{prefix}*") if parent.is_dir() else ():
        with contextlib.suppress(OSError):  # somebody holds it, or is not this user, or has removed it at this moment
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or time.time() - folder.stat().st_mtime < FRESH:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def require_room(folder: Path, need: int, option: str) -> None:
    """Refuse before anything is written when the disk is too small.

    Raises:
        InputProblem: how much is needed and how much is there.
    """
    there = free(folder)
    if need > there:
        scale, unit = (30, "GiB") if need >= 1 << 29 else (20, "MiB")
        sizes = f"{need / 2**scale:.1f} {unit} are needed, {there / 2**scale:.1f} {unit} are free"
        raise InputProblem(f"{folder}: {sizes}; set {option} to a folder on a larger disk")


def forget_old(cache: Path, made: re.Pattern[str], used: Path) -> None:
    """Note that the folder ``used`` of a cache is used now, and remove the longest unused folders that ``made`` names beyond ``MOST_MADE``; never a folder
    used within ``SPARED`` seconds, which a job may be reading, and never anything else that lies in the cache.
    """
    with contextlib.suppress(OSError):  # a cache that cannot be written, or from which another job removes at this moment: it is only not smaller
        if used.is_dir():
            os.utime(used)
        ages = {folder: folder.stat().st_mtime for folder in cache.iterdir() if made.fullmatch(folder.name) and not folder.is_symlink()}
        for folder in sorted(ages, key=lambda folder: -ages[folder])[MOST_MADE:]:
            if time.time() - ages[folder] > SPARED:
                aside = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
                folder.rename(aside)  # at once: nobody finds half of it
                shutil.rmtree(aside, ignore_errors=True)


def free(folder: Path) -> int:
    """Bytes that are free on the folder's disk."""
    return shutil.disk_usage(_nearest(folder)).free


def _nearest(folder: Path) -> Path:
    """The folder, or what is there of the way to it."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there
