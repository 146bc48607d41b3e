"""A host whose cable is pulled, and a rank of another host killed or stopped in a collective: every other says who is missing, in which sum, and all end.

What runs is ``launch/qwen3_moe.sh consistency --soak`` on each host: collectives one after another, so whoever is harmed is in the middle of one.
Of a host's ranks the first that ends has its error shown; where each is to be heard, each has a host of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import launched
import netns_hosts as network
import pytest
from netns_hosts import Host

from examples.qwen3_moe.consistency import COLLECTIVES

SECONDS = 10
"""What ``TIO_COLLECTIVE_SECONDS`` is. The tests wait for much longer: what is tested is who is named, in which sum, and that all end."""
IN_CI = [(signal.SIGSTOP, "doubling")]
"""The others are slow together. SIGKILL is there too, above."""
pytestmark = pytest.mark.usefixtures("several_hosts")


@dataclass
class Told:
    """What a host has said and the status with which its launch script ended. ``lines``: of its stderr."""

    line: str
    status: int
    lines: list[str]


class Listener:
    """Reads what a host says while it says it."""

    def __init__(self, process) -> None:
        self.process, self.lines, self._wrong = process, [], []
        self._readers = [threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in (process.stdout, process.stderr)]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe) -> None:
        for line in pipe:
            self.lines.append(line.rstrip())
            if pipe is self.process.stderr:
                self._wrong.append(line.rstrip())

    def errors(self) -> list[str]:
        """What the process, which has ended, has said on stderr."""
        for reader in self._readers:
            reader.join(10)
        return self._wrong

    def heard(self, text: str, seconds: float) -> str:
        """The first line with ``text``."""
        deadline = time.monotonic() + seconds
        while True:
            found = [line for line in self.lines if text in line]
            if found:
                return found[0]
            assert time.monotonic() < deadline and (self.process.poll() is None or not text), (self.process.poll(), self.lines)
            time.sleep(0.02)


def told(
    hosts: int,
    ranks: int,
    folder: Path,
    harm: Callable[[list[Host], dict[int, int]], object],
    survivors: set[int],
    collectives: tuple[str, ...] = COLLECTIVES,
    all_end: bool = True,
    *,
    training: bool = False,
    signs: Mapping[int, str] = MappingProxyType({}),
) -> dict[int, Told]:
    """What ``survivors`` of ``hosts`` with ``ranks`` each are told after ``harm(hosts, processes by rank)``. ``all_end``: the other hosts end too.
    ``signs``: by which words a host's line is known, if it is not a rank's error.

    ``training``: not collectives, but a training that begins; the harm is done before its groups are made.
    """
    words = ["consistency", "--layouts", f"dp{hosts * ranks}"]
    words += ["--sizes", "5", "--steps", "500"] if training else ["--soak", "600", "--collectives", *collectives]
    begun = "sum of " if training else f"{hosts * ranks} ranks on {hosts} hosts: every collective has come back once"
    scratch = folder / "temporary"
    scratch.mkdir()
    variables = {"TIO_COLLECTIVE_SECONDS": str(SECONDS), "TMPDIR": str(scratch)}
    with network.hosts(hosts) as made:
        listeners = [Listener(process) for process in launched.start(made, folder, words, **variables)]
        first = listeners[0]
        first.heard(begun, 120)
        places = {rank: process for host in made for rank, process in launched.ranks_on(host).items()}
        assert sorted(places) == list(range(hosts * ranks))
        harm(made, places)
        found = {}
        for host in survivors:
            line = listeners[host].heard(signs.get(host, "CollectiveError: "), 300)
            found[host] = Told(line, listeners[host].process.wait(300), listeners[host].errors())
        for number in set(range(hosts)) - survivors if all_end else ():
            listeners[number].process.wait(300)  # a stopped rank's torchrun finds the first host gone, and ends it
        left = [process for number, host in enumerate(made) for process in host.processes() if all_end or number in survivors]
        assert not left, "no process outlives the job"
        assert not all_end or not list(scratch.glob("qwen3_moe-*")), "nothing that the job has written is left behind"
        return found


def test_a_host_that_is_cut_off(tmp_path):
    found = told(2, 2, tmp_path, lambda hosts, ranks: hosts[1].link(False), {0, 1})
    for host, heard in found.items():
        away = [2, 3] if host == 0 else [0, 1]
        assert heard.status == 1, found
        assert f"over ranks 0, 1, 2, 3: rank {away[0]} does not answer" in heard.line, found
        assert ("is this host's network up, and the first host's?" in heard.line) == (host == 1), found


def test_a_rank_killed_on_the_other_host(tmp_path):
    signs = {1: "exitcode  : -9"}  # torchrun's own account
    found = told(2, 2, tmp_path, lambda hosts, ranks: os.kill(ranks[3], signal.SIGKILL), {0, 1}, signs=signs)
    assert found[0].status == 1 and found[1].status == 137 and any("rank      : 3 " in line for line in found[1].lines), found
    # torchrun ends the other rank of that host in the same moment.
    assert re.search(r"over ranks 0, 1, 2, 3: (rank 2 does not answer \(pid .*|)rank 3 does not answer \(pid \d+ on h1: killed, ", found[0].line), found


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_killed_on_the_first_host(tmp_path, rank):
    """The store that brought the ranks together is there; it stays until the other host's ranks have asked it."""
    signs = {0: "exitcode  : -9"}  # torchrun's own account
    found = told(2, 2, tmp_path, lambda hosts, ranks: os.kill(ranks[rank], signal.SIGKILL), {0, 1}, signs=signs)
    assert found[0].status == 137 and any(f"rank      : {rank} " in line for line in found[0].lines) and found[1].status == 1, found
    assert re.search(rf"over ranks 0, 1, 2, 3: (rank 0 does not answer \(pid .*|)rank {rank} does not answer \(pid \d+ on h0: killed, ", found[1].line), found


def test_all_of_the_first_host_is_killed(tmp_path):
    """With it the store ends: the others say that, and in which collective they waited for whom."""

    def kill(hosts, ranks):
        for number in hosts[0].processes():
            with contextlib.suppress(ProcessLookupError):  # with the host's first process all of it goes
                os.kill(number, signal.SIGKILL)

    found = told(2, 2, tmp_path, kill, {1}, all_end=False)[1]
    assert found.status == 1, found
    assert re.search(
        r"over ranks 0, 1, 2, 3: rank 0 does not answer \(pid .*rank 1 does not answer \(pid .*the store .*, at 10\.77\.0\.1:\d+, has ended", found.line
    ), found


def test_the_first_host_is_cut_off_while_groups_are_made(tmp_path):
    """The store is behind that cable: whoever asks it hears nothing, and torch itself would wait for an answer until the cable is back."""
    found = told(2, 2, tmp_path, lambda hosts, ranks: hosts[0].link(False), {0, 1}, training=True)
    for host, heard in found.items():
        away = [2, 3] if host == 0 else [0, 1]
        assert heard.status == 1, found
        says = rf"making the process groups of .* over ranks 0, 1, 2, 3: rank {away[0]} does not answer \(pid .*rank {away[1]} does"
        assert re.search(says, heard.line), found


@pytest.mark.parametrize(
    "number, collective",
    [
        pytest.param(number, collective, id=f"{number.name}-{collective}", marks=[] if (number, collective) in IN_CI else [pytest.mark.full])
        for number in (signal.SIGSTOP, signal.SIGKILL)
        for collective in COLLECTIVES
    ],
)
def test_a_rank_of_another_host_is_harmed_in_a_collective(tmp_path, collective, number):
    """Three hosts with a rank each: both others name the third. torchrun needs 30 s more to end a stopped rank."""
    found = told(3, 1, tmp_path, lambda hosts, ranks: os.kill(ranks[2], number), {0, 1}, (collective,), collective == "ring")
    for heard in found.values():
        assert heard.status == 1, found
        # Another host's processes cannot be looked at: which of the four it is, is for who goes there.
        assert re.search(r"over ranks 0, 1, 2: rank 2 does not answer \(pid \d+ on h2: killed, stopped, busy elsewhere, or cut off\)", heard.line), found
