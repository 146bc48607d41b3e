"""Every collective ends: with its result, or within the time that was set with an error that names the collective, its group and who is missing.

A backend only says that a connection was closed or that a wait took too long, and not by whom: a rank that gives up closes its own connections,
so most ranks lose one that is well. So each asks the others why (:mod:`~tio_megatron.collectives.last_words`) before it raises.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tio_megatron.collectives import last_words, wire
from tio_megatron.collectives.last_words import Heard, Who, Words

SECONDS = 600.0
"""How long a collective may take from its first message to its end, error included, when ``TIO_COLLECTIVE_SECONDS`` is not set."""

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Read error",
    "Write error",
    "Socket Timeout",
    "timed out",
)
"""How backends say that another rank is not there."""
_SHOWN = 16


class CollectiveError(RuntimeError):
    """A collective could not end.

    Attributes:
        collective: its name.
        ranks: of its group, in the world.
        missing: of those, who is missing (or has left with an error of its own); empty where the network alone broke.
        waited: seconds from the collective's beginning to the loss.
    """

    def __init__(self, text: str, collective: str, ranks: tuple[int, ...], missing: tuple[int, ...], waited: float) -> None:
        super().__init__(text)
        self.collective, self.ranks, self.missing, self.waited = collective, ranks, missing, waited


@lru_cache(maxsize=4)
def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1 <= found <= 10_000_000:
        raise ValueError(f"TIO_COLLECTIVE_SECONDS={text!r} is not a number of seconds from 1 on, such as {SECONDS:g}")
    return found


def seconds() -> float:
    """The time in force: ``TIO_COLLECTIVE_SECONDS``, or :data:`SECONDS`. Should be the same on all ranks.

    Raises:
        ValueError: the variable is no number of seconds.
    """
    text = os.environ.get("TIO_COLLECTIVE_SECONDS", "")
    return _seconds(text) if text else SECONDS


def patience() -> float:
    """How long to wait for others: what :func:`seconds` leaves when some of it is kept for finding out who is missing."""
    limit = seconds()
    return limit - _report(limit)


def _report(limit: float) -> float:
    return min(3.0, limit / 4)


def lost_others(error: BaseException) -> bool:
    """Whether an error says no more than that some other rank is not there, or the store that brought the ranks together."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, CollectiveError) and any(sign in str(error) for sign in _LOST)


Place = tuple[str, tuple[int, ...]]
"""Where in a collective: words for it, and the peers waited for just then, by their ranks in the group (nobody: all of them)."""

_known: WeakKeyDictionary[wire.AnyGroup, bool] = WeakKeyDictionary()
"""Groups that have come together: True when this rank knows where the others run."""


class Call:
    """One collective: ``with Call("all_reduce", group) as call:``, and :attr:`deadline` with every message.

    ``where(number)`` says what its step :attr:`number` is. What goes wrong inside with the other ranks becomes a :class:`CollectiveError`; any other
    error passes as it is, after the others have been told.
    """

    __slots__ = ("what", "group", "where", "number", "began", "deadline")

    def __init__(self, what: str, group: wire.Group, where: Callable[[int], Place] | None = None) -> None:
        self.what, self.group, self.where = what, group, where
        self.number = 0

    def __enter__(self) -> Call:
        if self.group is not None and self.group not in _known:
            last_words.session()
            _known[self.group] = False
        self.began = time.monotonic()
        self.deadline = self.began + patience()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.group is None:
            return
        if error is None:
            if not _known[self.group]:
                self._look()
            return
        waited = time.monotonic() - self.began
        if isinstance(error, CollectiveError):
            return
        place, peers = self.where(self.number) if self.where is not None else ("", ())
        if lost_others(error):
            wire.hang_up(self.group)
            raise explained(error, self.what + place, self.group, waited, peers) from error
        leave(error, f"in {self.what}{place}")  # before the others can ask
        wire.hang_up(self.group)

    def _look(self) -> None:
        """The first collective has ended here, so everybody has announced itself; where this rank does not wait for its end, a later one looks."""
        assert self.group is not None
        known = last_words.session()
        if known is not None and wire.waits(self.group):
            known.look(last_words.global_ranks(self.group))
        _known[self.group] = True


def leave(error: BaseException, where: str = "") -> None:
    """Leave an error of this rank as its last words, so that the others can name it. For a handler at the end of a program.

    An uncaught error is left without this, and so is one inside a collective.
    """
    known = last_words.session()
    if known is not None:
        text = last_words.described(error)
        known.leave(Words(known.rank, f"{text} ({where})" if where else text, own=True), 1.0)


def explained(error: BaseException, what: str, group: wire.Group = None, waited: float = 0.0, peers: tuple[int, ...] = ()) -> CollectiveError:
    """The error that names who is missing, for one of a backend. Asks the other ranks, for a few seconds at most.

    Args:
        error: the backend's.
        what: the collective.
        group: its group; the world where None.
        waited: seconds from its beginning to the error.
        peers: whom it waited for just then, by their ranks in the group; everybody where empty.
    """
    ranks, known = last_words.global_ranks(group), last_words.session()
    waited_for = tuple(ranks[peer] for peer in peers) or ranks
    limit = seconds()
    said = str(error).splitlines()[0] if str(error) else ""
    said = f"{type(error).__name__}: {said}" if isinstance(error, dist.DistError) else last_words.described(error)  # without the frames of its C++
    backend = said.partition("] ")[2].partition(". This is")[0] or said
    place = f"{what} over ranks {_numbers(ranks)}"
    if known is None:
        return CollectiveError(f"{place}: lost ranks {_numbers(waited_for)} ({backend})", what, ranks, waited_for, waited)
    others = [rank for rank in ranks if rank != known.rank]
    lost = [rank for rank in waited_for if rank != known.rank]
    heard = known.exchange(Words(known.rank, f"{place}: lost the connection to ranks {_numbers(lost)}"), others, _report(limit) - 0.5)
    missing, why = _verdict(heard, others, lost, known)
    met = f"exchanging with {_ranks(lost)}" if len(lost) < len(others) else "waiting"
    text = f"{place}: {why}; rank {known.rank} noticed after {waited:.1f} of {limit:g} s (TIO_COLLECTIVE_SECONDS), {met} ({backend})"
    if heard.reached:
        known.conclude(Words(known.rank, f"{place}: {why}"[: last_words.LIMIT], missing=missing, final=True), sorted(heard.words), 0.4)
    return CollectiveError(text, what, ranks, missing, waited)


def _verdict(heard: Heard, others: list[int], lost: list[int], known: last_words.Session) -> tuple[tuple[int, ...], str]:
    """Who is missing, and in words why."""
    words = heard.words
    own = [rank for rank in others if rank in words and words[rank].own]
    failed = [rank for rank in own if not words[rank].ended]
    if failed:
        return tuple(failed), "; ".join(f"rank {rank} has left with {words[rank].text}" for rank in failed[:_SHOWN])
    if own:
        return tuple(own), f"{_ranks(own)} {'has' if len(own) == 1 else 'have'} ended early, without an error: the end of the program, or sys.exit"
    silent = [rank for rank in others if rank not in words]
    states = {rank: heard.who[rank].state() if rank in heard.who else "unknown" for rank in silent}
    if heard.lost and not heard.reached:
        silent, states = [rank for rank in silent if rank in heard.lost], heard.lost
    away = [rank for rank in silent if states[rank] in ("gone", "stopped")]
    if not away and not heard.reached:
        here = heard.who.get(known.rank)
        # Who is in this rank's own network is no worse off than it is itself.
        away = [rank for rank in others if here is not None and rank in heard.who and heard.who[rank].network != here.network] or lost
        if heard.ended and 0 in heard.who and here is not None and heard.who[0].network != here.network:
            # The store is on rank 0's host, and its end is that of what ran there; of further hosts nothing is known.
            away = [rank for rank in away if rank in heard.who and heard.who[rank].network == heard.who[0].network] or lost
        who = "; ".join(_silence(rank, heard.who.get(rank), states.get(rank, "unknown"), asked=False) for rank in away[:_SHOWN])
        if heard.ended:
            return tuple(away), f"{who}; the store that brought the ranks together, at {heard.ended}, has ended (with what started the ranks of its host)"
        store = "nor does the store that brought the ranks together (without torchrun it lives in rank 0 and ends with it)"
        return tuple(away), f"{who}; {store}: is this host's network up, and the first host's?"
    if away or silent:
        found = away or silent
        return tuple(found), "; ".join(_silence(rank, heard.who.get(rank), states[rank]) for rank in found[:_SHOWN])
    blamed = {rank: found for rank, found in words.items() if found.missing}
    if any(known.rank in found.missing for found in blamed.values()):
        return (), f"{_ranks(sorted(blamed))} gave up waiting for this rank, which came late"
    if blamed:
        first = words[min(blamed)]
        return tuple(sorted({rank for found in blamed.values() for rank in found.missing})), f"rank {first.rank} has left: {first.text}"
    return (), "no rank is missing, the connections between them broke"


def _silence(rank: int, who: Who | None, state: str, asked: bool = True) -> str:
    if who is None and not asked:
        return f"rank {rank} does not answer (nor is it known where it runs)"
    if who is None:
        return f"rank {rank} does not answer (it has not come to any collective yet)"
    at = f"pid {who.pid} on {who.host}"
    if state == "gone":
        return f"rank {rank} has ended or died ({at})"
    if state == "stopped":
        return f"rank {rank} is stopped ({at}; by SIGSTOP or a debugger)"
    if state == "running":
        return f"rank {rank} does not answer ({at}, which runs: it is busy elsewhere, or the network between is down)"
    return f"rank {rank} does not answer ({at}: killed, stopped, busy elsewhere, or cut off)"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_numbers(ranks)}"


def _numbers(ranks: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return shown if len(ranks) <= _SHOWN else f"{shown} and {len(ranks) - _SHOWN} more"
