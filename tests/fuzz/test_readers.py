"""Damaged files: every reader gives a valid result or one clear error, soon and within bounded memory. Seeds are fixed, so a failure comes again.

A case is (reader, file, number); ``one`` runs it again, in a debugger too.
"""

from __future__ import annotations

import random
import resource
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_readers import READERS, Reader
from mutations import mutated

from tio_megatron.checkpoint import CheckpointError
from tio_megatron.jobs.problems import InputProblem
from tio_megatron.rollouts import StoreError

CLEAR = (ValueError, CheckpointError, StoreError, InputProblem)
"""These and none derived from them: UnicodeDecodeError and JSONDecodeError say what, not where."""
SECONDS = 5
ROOM = 1 << 30
LONGEST = 3000
QUICK, LONG = 250, 3000


class TooSlow(BaseException):
    """No reader may catch it."""


def _late(number: int, frame: object) -> None:
    raise TooSlow


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A GiB of further memory, and a clock."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def one(reader: Reader, name: str, number: int, folder: Path) -> str | None:
    """What is wrong with how ``reader`` takes its ``number``-th damage of file ``name``; None when nothing is. The file is as it was afterwards."""
    path = folder / name
    valid = path.read_bytes()
    path.write_bytes(mutated(random.Random(f"{reader.name} {name} {number}"), valid))
    if reader.seal is not None:
        reader.seal(folder)
    try:
        return _read(reader, folder)
    finally:
        path.write_bytes(valid)


def _read(reader: Reader, folder: Path) -> str | None:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.read(folder)
    except TooSlow:
        return f"took more than {SECONDS} s"
    except Exception as error:  # noqa: BLE001  (which kinds may come is what is tested)
        said = str(error)
        if type(error) not in CLEAR:
            return f"{type(error).__name__}: {said[:300]}"
        if len(said) > LONGEST:
            return f"a message of {len(said)} characters: {said[:200]}"
        if "damaged" not in said and not said.startswith("contract: "):
            return f"does not say which file: {said[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def run(reader: Reader, count: int, base: Path) -> None:
    folder = base / "ü damaged"
    folder.mkdir()
    reader.make(folder)
    reader.read(folder)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in reader.files:
            for number in range(count // len(reader.files)):
                wrong = one(reader, name, number, folder)
                if wrong:
                    found.append(f"{name} {number}: {wrong}")
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_files(reader: Reader, tmp_path: Path) -> None:
    run(reader, QUICK, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_many_damaged_files(reader: Reader, tmp_path: Path) -> None:
    run(reader, LONG, tmp_path)


def test_a_reader_that_lets_an_error_through_is_caught(tmp_path: Path) -> None:
    """Negative control."""
    import json

    def make(folder: Path) -> None:
        (folder / "x.json").write_text("[1, 2]")

    careless = Reader("control", make, lambda folder: json.loads((folder / "x.json").read_text()), ("x.json",))
    with pytest.raises(AssertionError, match="JSONDecodeError"):
        run(careless, 50, tmp_path)
