"""Files that are there whole or not at all, and errors of the system that name their file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFTS = ".*.draft-*"
"""The pattern that names of drafts have: what a process that was killed leaves behind."""


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Errors of the system in this block name ``path``, those too that name its ``draft``: writing to an open file for which there is no space names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, draft and str(draft)):
            error.filename = str(path)
        raise


@contextmanager
def drafted(path: Path, *, to_disk: bool = False) -> Iterator[Path]:
    """The path of a draft beside ``path``, which takes its name when the block ends without an error and is removed otherwise.

    Whoever reads ``path`` finds all of it, what was there before, or nothing.

    Args:
        path: its folder is made.
        to_disk: come back when the file and its name are on the disk, not in the system's memory alone.

    Raises:
        OSError: the system refuses; names ``path``. Nothing is left behind then.
    """
    draft = path.parent / f".{path.name}.draft-{os.getpid()}"
    with naming(path, draft):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            if to_disk:
                sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        if to_disk:
            sync(path.parent)


def write_whole(path: Path, content: bytes, *, to_disk: bool = False) -> None:
    """Write a file that is all there or not at all, see :func:`drafted`.

    Raises:
        OSError: as :func:`drafted`.
    """
    with drafted(path, to_disk=to_disk) as draft:
        draft.write_bytes(content)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(there)
    finally:
        os.close(there)
