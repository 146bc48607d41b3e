"""Files that are there whole or not at all, and errors of the system that name their file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system in this block name ``path``: writing to an open file that the disk has no space for names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_whole(path: Path, content: bytes, *, to_disk: bool = False) -> None:
    """Write a file by way of a draft beside it: whoever reads ``path`` finds all of it, what was there before, or nothing.

    Args:
        path: its folder is made.
        content: all of the file.
        to_disk: come back when the file and its name are on the disk, not in the system's memory alone.

    Raises:
        OSError: the system refuses; names ``path``. Nothing is left behind then.
    """
    draft = path.parent / f".{path.name}.draft-{os.getpid()}"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content)
                if to_disk:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        if to_disk:
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    there = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(there)
    finally:
        os.close(there)
