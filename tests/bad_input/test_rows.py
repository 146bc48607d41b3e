"""Each row of bad input gives its one error, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bad_input.table import PAGE, Row, page, rows

LONGEST = 1500
ROWS = rows()


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times below a folder; a tmpfs that a row mounted is gone with its row."""
    return {str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*") if not path.is_dir()}


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a space and other letters in its name, temporary files and the cache in folders of their own, signals as they were."""
    folder, scratch = tmp_path / "my ü 名 folder", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TIO_CACHE", str(folder / "cache"))
    for name in ("RANK", "WORLD_SIZE", "TIO_CONTRACT"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_one_readable_error_and_nothing_left_behind(row: Row, clean: Path) -> None:
    before, running, files = {}, children(), len(os.listdir("/proc/self/fd"))

    def ready() -> None:
        before.update(listing(clean))

    with pytest.raises((ValueError, OSError)) as refused:
        act = row.act(clean)
        ready()
        act()
    said = str(refused.value)
    assert row.said in said, said
    assert type(refused.value) is not UnicodeDecodeError and len(said) < LONGEST, said
    assert isinstance(refused.value, ValueError) or refused.value.filename, "an error of the system must name the file"
    assert listing(clean) == before
    assert not list((clean.parent / "scratch").iterdir())
    assert children() <= running
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_rows_have_names_of_their_own() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS) >= 60


def test_the_page_is_that_of_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "remake it: python -m tests.bad_input.table"
