"""What ranks can still learn about each other when a group's connections have broken: each leaves its last words in the store that brought
them together, and says before its first collective where it runs. Moves no tensor.

Nothing here may hang or raise: the store may be as unreachable as the ranks, so everything that asks it does so in a thread, for a bounded time.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tio_megatron.collectives import store_line

LIMIT = 600
"""Most characters of a rank's last words."""

_POLL = 0.02
_ONE_HOST = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
_START = f"tio_megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if _ONE_HOST else '0'}"
_WHO, _WORDS = f"{_START}/who/", f"{_START}/words/"
"""Of this start: torchrun's store outlives the ranks that it restarts. Over several hosts each torchrun has a count of its own, which need not agree."""


@dataclass(frozen=True)
class Who:
    """Where a rank runs. ``machine`` is one kernel and one numbering of processes, ``network`` one network namespace of it."""

    rank: int
    host: str
    machine: str
    network: str
    pid: int
    started: str

    def state(self) -> str:
        """``gone``, ``stopped``, ``running``, or ``elsewhere``: another machine, where this one cannot look."""
        if self.machine != _here()[0]:
            return "elsewhere"
        found = _process(self.pid)
        if found is None or found[0] in "ZX" or found[1] != self.started:
            return "gone"
        return "stopped" if found[0] in "Tt" else "running"


@dataclass(frozen=True)
class Words:
    """Why ``rank`` leaves. ``own``: an error of its own, or (``ended``) its program's end; else it lost others, and once it is ``final`` has found
    ``missing`` missing.
    """

    rank: int
    text: str
    own: bool = False
    ended: bool = False
    missing: tuple[int, ...] = ()
    final: bool = False


@dataclass
class Heard:
    """What the store knew: ``words`` and ``who`` by rank; ``reached`` says whether it answered, ``ended`` where it was when nobody listens there any more.

    ``lost``: who was gone or stopped at once. Later others may have gone who only said the same.
    """

    words: dict[int, Words] = field(default_factory=dict)
    who: dict[int, Who] = field(default_factory=dict)
    reached: bool = False
    ended: str = ""
    lost: dict[int, str] = field(default_factory=dict)


class Session:
    """This process's part in one default process group: the group's store, and what has been said there."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank, self.pid = store, rank, os.getpid()
        self.said = False
        self.who: dict[int, Who] = {}

    def announce(self) -> None:
        """Say where this rank runs."""
        machine, network, host = _here()
        process = _process(os.getpid())
        self.who[self.rank] = Who(self.rank, host, machine, network, os.getpid(), process[1] if process else "")
        self.store.set(f"{_WHO}{self.rank}", json.dumps(asdict(self.who[self.rank])))

    def look(self, ranks: Sequence[int]) -> None:
        """Where the others run, who have all announced themselves by now."""
        wanted = [rank for rank in ranks if rank not in self.who]

        def ask() -> None:
            if self.store.check([f"{_WHO}{rank}" for rank in wanted]):
                self.who.update({rank: _who(self.store.get(f"{_WHO}{rank}")) for rank in wanted})

        if wanted:
            _bounded(ask, 1.0)

    def leave(self, words: Words, seconds: float) -> None:
        """Leave words, unless some were left before."""
        if not self.said:
            self.said = True
            _bounded(lambda: _say(_clone(self.store), words), seconds)

    def end(self) -> None:
        """Leave word that this rank's program has come to its end, unless it has said more. Over the connection that is there: a set waits for no answer."""
        if not self.said and self.pid == os.getpid():
            self.said = True
            _bounded(lambda: _say(self.store, Words(self.rank, "", own=True, ended=True)), 0.5)

    def exchange(self, words: Words, ranks: Sequence[int], seconds: float) -> Heard:
        """Leave ``words`` and listen for those of ``ranks`` until the reason is known or ``seconds`` have passed."""
        heard, first, self.said = Heard(who=dict(self.who)), not self.said, True
        heard.lost = {rank: who.state() for rank, who in heard.who.items() if who.state() in ("gone", "stopped")}
        deadline = time.monotonic() + seconds

        def converse() -> None:
            store = _clone(self.store)
            if first:
                _say(store, words)
            sure = False
            while True:
                for rank in ranks:
                    if rank not in heard.who and store.check([f"{_WHO}{rank}"]):
                        heard.who[rank] = _who(store.get(f"{_WHO}{rank}"))
                    if rank not in heard.words and store.check([f"{_WORDS}{rank}"]):
                        heard.words[rank] = _words(store.get(f"{_WORDS}{rank}"))
                heard.reached = True
                silent = [rank for rank in ranks if rank not in heard.words]
                lost = [rank for rank in silent if rank in heard.who and heard.who[rank].state() in ("gone", "stopped")]
                if any(found.own for found in heard.words.values()) or time.monotonic() > deadline or (len(lost) == len(silent) and sure):
                    return
                sure = len(lost) == len(silent)  # once more: who has just gone may have said something before
                time.sleep(_POLL)

        _bounded(converse, seconds + 2 * _POLL)
        place = store_line.address(self.store)
        if not heard.reached and place is not None and store_line.ended(place):
            heard.ended = f"{place[0]}:{place[1]}"
        return heard

    def conclude(self, words: Words, ranks: Sequence[int], seconds: float) -> None:
        """Put what was found in the place of this rank's words: who lost this rank alone learns from it why.

        Then wait until ``ranks`` have found out too, for with this process the store may go.
        """
        deadline = time.monotonic() + seconds

        def converse() -> None:
            store = _clone(self.store)
            _say(store, words)
            while time.monotonic() < deadline:
                found = [_words(store.get(f"{_WORDS}{rank}")) for rank in ranks if store.check([f"{_WORDS}{rank}"])]
                if all(each.final or each.own for each in found):
                    return
                time.sleep(_POLL)

        _bounded(converse, seconds + 2 * _POLL)


_session: Session | None = None


def session() -> Session | None:
    """The session of the default process group; None where there is none, or one without a store."""
    global _session
    try:
        store = dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None
    if _session is None or _session.store is not store:
        _session = Session(store, dist.get_rank())
        try:
            _session.announce()
        except RuntimeError:  # the store has gone: then the first collective says so
            pass
        _listen()
    return _session


def global_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of ``group`` in the world."""
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else ()


_stock_hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def _listen() -> None:
    """From now on an error that ends this process is left for the others: the one thing that the reason of their loss would be lost with."""
    global _stock_hook
    if _stock_hook is None:
        _stock_hook = sys.excepthook
        sys.excepthook = _last
        atexit.register(_end)


def _last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _stock_hook is not None
    if _session is not None and dist.is_initialized():
        _session.leave(Words(_session.rank, described(error), own=True), 1.0)
    _stock_hook(kind, error, trace)


def _end() -> None:
    """The program has ended, with or without its group: who still waits for this rank would else take it for busy, or killed."""
    if _session is not None:
        _session.end()


def described(error: BaseException) -> str:
    """An error in one bounded line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LIMIT else text[: LIMIT - 3] + "..."


def _clone(store: Store) -> Store:
    """A connection of one's own: the shared one may be held by a thread that waits."""
    found: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub leaves it out
    return found


def _say(store: Store, words: Words) -> None:
    store.set(f"{_WORDS}{words.rank}", json.dumps(asdict(words)))


def _who(text: bytes) -> Who:
    return Who(**json.loads(text))


def _words(text: bytes) -> Words:
    found = json.loads(text)
    return Words(**found | {"missing": tuple(found["missing"])})


def _bounded(work: Callable[[], None], seconds: float) -> None:
    """``work`` in a thread of its own, left behind when it takes longer; a store that fails is one that knows nothing."""

    def run() -> None:
        try:
            work()
        except (RuntimeError, OSError, ValueError, TypeError):
            return

    thread = threading.Thread(target=run, daemon=True, name="tio_megatron last words")
    thread.start()
    thread.join(max(0.0, seconds))


@lru_cache(maxsize=1)
def _here_in(pid: int) -> tuple[str, str, str]:
    def read(name: str, link: bool = False) -> str:
        try:
            if link:
                return os.readlink(name)
            with open(name) as file:
                return file.read().strip()
        except OSError:
            return f"unknown to {pid}"

    boot = read("/proc/sys/kernel/random/boot_id")
    return f"{boot} {read('/proc/self/ns/pid', True)}", f"{boot} {read('/proc/self/ns/net', True)}", socket.gethostname()


def _here() -> tuple[str, str, str]:
    """This process's machine, network and host name."""
    return _here_in(os.getpid())


def _process(pid: int) -> tuple[str, str] | None:
    """The state's letter and the start time of a process; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]
