"""A folder of batches that only grows.

``store.json`` says what it is; ``00000000.safetensors`` and so on are the batches. A file gets its name when all of it is on the disk and is
never touched again, so whoever is killed leaves the batches before and nothing else. Each file names the digest of the one before: a batch that
is missing, changed or moved shows, and the digest of the last one (:attr:`Store.head`) stands for all of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tio_megatron.files.strict_json import read_json
from tio_megatron.files.whole import DRAFTS, write_whole
from tio_megatron.rollouts.batch import About, Batch
from tio_megatron.rollouts.batch_file import FORMAT, NOTHING, Head, decode, encode, file_digest, read_head
from tio_megatron.rollouts.draw import Drawn, draw
from tio_megatron.rollouts.errors import StoreError

STORE = "store.json"
_LOCK = ".lock"
_NAME = re.compile(r"(\d{8,18})\.safetensors")
_SAYS = json.dumps({"format": FORMAT}) + "\n"


@dataclass(frozen=True)
class Place:
    """Where a rollout is: the number of its batch, and which sequence of it."""

    batch: int
    sequence: int


@dataclass(frozen=True)
class Audit:
    """What :meth:`Store.verify` read: how many batches, sequences, tokens (responses: ``sampled``), and the digest that stands for all."""

    batches: int
    sequences: int
    tokens: int
    sampled: int
    head: str


class Store:
    """Batches by number, rollouts by their place among all. Open with :meth:`create` or :meth:`open`; nothing is held open.

    A store is read as it was when it was opened, or at the last :meth:`append` or :meth:`refresh`. Several processes of one machine may append
    and read at once.
    """

    def __init__(self, folder: Path, heads: Sequence[Head]) -> None:
        self.folder = folder
        self._take(heads)

    @classmethod
    def create(cls, folder: Path | str) -> Store:
        """A new, empty store; its folder may exist if it is empty.

        Raises:
            StoreError: there is something in the folder, or the system refuses.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            there = sorted(path.name for path in folder.iterdir() if not path.match(DRAFTS))  # of somebody who was killed here
            if there:
                what = "a store already: open it" if STORE in there else f"not empty ({there[0]}, ...): name a new folder"
                raise StoreError(f"{folder}: {what}")
            _write(folder, STORE, _SAYS.encode())
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written ({error})") from error
        return cls(folder, [])

    @classmethod
    def open(cls, folder: Path | str) -> Store:
        """A store that is there. Reads the head of every batch; :meth:`verify` reads all of it.

        Raises:
            StoreError: no store, another format, or a batch is missing or damaged.
        """
        folder = Path(folder)
        try:
            said = read_json((folder / STORE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(f"{folder}: no store of rollouts ({STORE} is missing)") from None
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{folder / STORE}: cannot be read ({error})") from None
        if said != {"format": FORMAT}:
            raise StoreError(f"{folder / STORE}: another format than {FORMAT!r}")
        return cls(folder, _heads(folder, []))

    def refresh(self) -> None:
        """See what others have appended."""
        self._take(_heads(self.folder, self._heads))

    def append(self, batch: Batch) -> int:
        """Add a batch; when this returns, it is on the disk. On any failure the store is as it was.

        Returns:
            Its number.

        Raises:
            StoreError: the system refuses, or the last batch is damaged.
        """
        try:
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written ({error})") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for stale in self.folder.glob(DRAFTS):  # whoever made it is dead: the lock is ours
                stale.unlink()
            self.refresh()
            number = self.batches
            _write(self.folder, _name(number), encode(batch, number, self._whole_head()))
            self.refresh()
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written ({error}); the {self.batches} batches before are as they were") from error
        finally:
            os.close(lock)
        return number

    @property
    def batches(self) -> int:
        """How many batches."""
        return len(self._heads)

    def __len__(self) -> int:
        """How many rollouts."""
        return self._ends[-1] if self._ends else 0

    @property
    def abouts(self) -> list[About]:
        """Where each batch comes from."""
        return [head.about for head in self._heads]

    @property
    def head(self) -> str:
        """SHA-256 of the last file, which stands for everything before it too; of an empty store 64 zeros."""
        return file_digest(self._raw(self.batches - 1)) if self._heads else NOTHING

    def _whole_head(self) -> str:
        """:attr:`head`, of a last batch that is whole: what followed a damaged one could not be told from a replaced one."""
        if not self._heads:
            return NOTHING
        number = self.batches - 1
        raw = self._raw(number)
        try:
            self._read(number, raw)
        except StoreError as error:
            raise StoreError(f"{error}; nothing is appended behind it: bring the file back, or take it out to go on from the batch before") from None
        return file_digest(raw)

    def batch(self, number: int) -> Batch:
        """One batch, checked against its own digest.

        Raises:
            StoreError: no such batch, or damaged.
        """
        if not 0 <= number < self.batches:
            raise StoreError(f"{self.folder}: no batch {number}; there are {self.batches}, counted from 0")
        return self._read(number, self._raw(number))[1]

    def __iter__(self) -> Iterator[Batch]:
        """The batches in their order; memory holds one."""
        return (self.batch(number) for number in range(self.batches))

    def place(self, index: int) -> Place:
        """Where the ``index``-th rollout of the whole store is."""
        if not 0 <= index < len(self):
            raise StoreError(f"{self.folder}: no rollout {index}; there are {len(self)}, counted from 0")
        number = bisect_right(self._ends, index)
        return Place(number, index - (self._ends[number - 1] if number else 0))

    def gather(self, indices: Sequence[int]) -> list[Batch]:
        """The rollouts at ``indices`` among all, in that order, each as a batch of one sequence. Every file is read once."""
        places = [self.place(index) for index in indices]
        found: dict[int, Batch] = {}
        for number in sorted({place.batch for place in places}):
            held = self.batch(number)
            found |= {i: held.select([place.sequence]) for i, place in enumerate(places) if place.batch == number}
        return [found[i] for i in range(len(places))]

    def sample(
        self, count: int, seed: int, *, weights: npt.NDArray[np.float64] | Sequence[float] | None = None, replace: bool = True, newest: int | None = None
    ) -> Drawn:
        """Places of ``count`` rollouts, drawn by :func:`tio_megatron.rollouts.draw`: the same on every machine.

        Args:
            count: how many.
            seed: decides the draw, together with the weights.
            weights: [len(store)], how likely each is against the others (prioritised); None: all alike (uniform).
            replace: a rollout may be drawn again.
            newest: only from that many newest batches.

        Raises:
            StoreError: too few rollouts, or weights that are none.
        """
        chosen = np.ones(len(self)) if weights is None else np.asarray(weights, dtype=np.float64)
        if chosen.shape != (len(self),):
            raise StoreError(f"{self.folder}: weights of the shape {list(chosen.shape)} for {len(self)} rollouts")
        if newest is not None:
            if newest < 1:
                raise StoreError(f"{self.folder}: newest must be 1 or more, got {newest}")
            first = self._ends[-newest - 1] if newest < self.batches else 0
            chosen = np.where(np.arange(len(self)) < first, 0.0, chosen)
        return draw(chosen, count, seed, replace=replace)

    def verify(self, head: str | None = None) -> Audit:
        """Read every byte: each batch against its own digest, and the chain of files.

        Args:
            head: a digest noted earlier (:attr:`head`), at least 16 digits of it; the store must hold everything that it stood for.

        Raises:
            StoreError: something is damaged, edited, missing or in another place, or batches that ``head`` stood for are gone.
        """
        if head is not None and not re.fullmatch(r"[0-9a-f]{16,64}", head):
            raise StoreError(f"{self.folder}: a head is 16 to 64 hex digits, got {head!r}")
        before, sequences, tokens, sampled, seen = NOTHING, 0, 0, 0, head is None or NOTHING.startswith(head)
        for number in range(self.batches):
            raw = self._raw(number)
            said, batch = self._read(number, raw)
            if said.before != before:
                raise StoreError(f"{self.folder / _name(number)}: follows a file {said.before[:16]}, but the one before is {before[:16]}: changed or replaced")
            before = file_digest(raw)
            seen = seen or before.startswith(str(head))
            sequences, tokens, sampled = sequences + len(batch), tokens + len(batch.tokens), sampled + int((batch.lengths - batch.prompts).sum())
        if not seen:
            raise StoreError(f"{self.folder}: no batch of the {self.batches} has the digest {head}: batches that were there are gone or changed")
        return Audit(self.batches, sequences, tokens, sampled, before)

    def _take(self, heads: Sequence[Head]) -> None:
        self._heads = list(heads)
        ends = np.cumsum([head.sequences for head in heads], dtype=np.int64)
        self._ends: list[int] = ends.tolist()

    def _raw(self, number: int) -> bytes:
        path = self.folder / _name(number)
        try:
            return path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from None

    def _read(self, number: int, raw: bytes) -> tuple[Head, Batch]:
        where = str(self.folder / _name(number))
        head, batch = decode(raw, where)
        if head.number != number:
            raise StoreError(f"{where}: says that it is batch {head.number}: moved or renamed")
        return head, batch


def _name(number: int) -> str:
    return f"{number:08d}.safetensors"


def _heads(folder: Path, known: Sequence[Head]) -> list[Head]:
    """Heads of all batches; those already known are not read again."""
    try:
        numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
        if numbers != list(range(len(numbers))):
            missing = next(i for i, number in enumerate(numbers) if i != number)
            raise StoreError(f"{folder}: batch {missing} is missing, batch {numbers[-1]} is there")
        if len(numbers) < len(known):
            raise StoreError(f"{folder}: batch {len(numbers)} was there and is gone")
        heads = list(known)
        for number in numbers[len(known) :]:
            found = read_head(folder / _name(number))
            if found.number != number:
                raise StoreError(f"{folder / _name(number)}: says that it is batch {found.number}: moved or renamed")
            heads.append(found)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read ({error})") from None
    return heads


def _write(folder: Path, name: str, raw: bytes) -> None:
    """Whole and on the disk, or not at all. The caller holds the lock, so nobody else takes the name."""
    if (folder / name).exists():
        raise StoreError(f"{folder / name}: is there already; a batch is never replaced")
    write_whole(folder / name, raw, to_disk=True)
