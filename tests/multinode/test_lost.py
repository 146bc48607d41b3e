"""A host whose cable is pulled, and a rank of another host that is killed or stopped in a collective: every other rank says in time who is missing.

What runs is ``launch/qwen3_moe.sh consistency --soak`` on each host: collectives one after another, so whoever is harmed is in the middle of one.
A host's ranks say it once; where each is to be heard, each has a host of its own.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import launched
import netns_hosts as network
import pytest
from loud import skip_outside_ci
from netns_hosts import Host

from examples.qwen3_moe.consistency_options import COLLECTIVES

SECONDS = 10
LEAVING = 8.0
"""Seconds that torchrun may take to end once a rank of its host has."""
IN_CI = [(signal.SIGSTOP, "doubling")]
"""The others are slow together. SIGKILL is there too, above."""
LACKING = network.missing()


@pytest.fixture(autouse=True)
def _needed() -> None:
    if LACKING:
        skip_outside_ci(f"{LACKING}: tests over several hosts")


@dataclass
class Told:
    """What a host has said and when its launch script ended with which status: seconds from the harm."""

    line: str
    said: float
    status: int
    ended: float


class Listener:
    """Reads what a host says while it says it."""

    def __init__(self, process) -> None:
        self.process, self.lines = process, []
        for pipe in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe) -> None:
        for line in pipe:
            self.lines.append((time.monotonic(), line.rstrip()))

    def heard(self, text: str, seconds: float) -> tuple[float, str]:
        """The first line with ``text``, and when it came."""
        deadline = time.monotonic() + seconds
        while True:
            found = [(at, line) for at, line in self.lines if text in line]
            if found:
                return found[0]
            assert time.monotonic() < deadline and (self.process.poll() is None or not text), (self.process.poll(), [line for _, line in self.lines])
            time.sleep(0.02)


def told(
    hosts: int,
    ranks: int,
    folder: Path,
    harm: Callable[[list[Host], dict[int, int]], object],
    survivors: set[int],
    collectives: tuple[str, ...] = COLLECTIVES,
    all_end: bool = True,
) -> dict[int, Told]:
    """What ``survivors`` of ``hosts`` with ``ranks`` each are told after ``harm(hosts, processes by rank)``. ``all_end``: the other hosts end too."""
    words = ["consistency", "--soak", "600", "--layouts", f"dp{hosts * ranks}", "--collectives", *collectives]
    with network.hosts(hosts) as made:
        listeners = [Listener(process) for process in launched.start(made, folder, words, TIO_COLLECTIVE_SECONDS=str(SECONDS), TIO_RENDEZVOUS_SECONDS="60")]
        first = listeners[0]
        first.heard(f"{hosts * ranks} ranks on {hosts} hosts: every collective has come back once", 120)
        places = {rank: process for host in made for rank, process in launched.ranks_on(host).items()}
        assert sorted(places) == list(range(hosts * ranks))
        began = time.monotonic()
        harm(made, places)
        found = {}
        for host in survivors:
            said, line = listeners[host].heard("qwen3_moe: rank ", SECONDS + 20)
            status = listeners[host].process.wait(60)
            found[host] = Told(line, said - began, status, time.monotonic() - began)
        for number in set(range(hosts)) - survivors if all_end else ():
            listeners[number].process.wait(60)  # a stopped rank's torchrun finds the first host gone, and ends it
        left = [process for number, host in enumerate(made) for process in host.processes() if all_end or number in survivors]
        assert not left, "no process outlives the job"
        return found


def test_a_host_that_is_cut_off(tmp_path):
    found = told(2, 2, tmp_path, lambda hosts, ranks: hosts[1].link(False), {0, 1})
    for host, heard in found.items():
        away = [2, 3] if host == 0 else [0, 1]
        assert heard.said < SECONDS + 1 and heard.status == 1, found
        assert f"over ranks 0, 1, 2, 3: rank {away[0]} does not answer" in heard.line, found
        assert ("is this host's network up, and the first host's?" in heard.line) == (host == 1), found
        assert heard.ended < heard.said + LEAVING, found


def test_a_rank_killed_on_the_other_host(tmp_path):
    found = told(2, 2, tmp_path, lambda hosts, ranks: os.kill(ranks[3], signal.SIGKILL), {0, 1})
    assert found[0].said < SECONDS and found[0].status == 1 and found[0].ended < found[0].said + LEAVING, found
    # torchrun ends the other rank of that host in the same moment.
    assert re.search(r"over ranks 0, 1, 2, 3: (rank 2 does not answer \(pid .*|)rank 3 does not answer \(pid \d+ on h1: killed, ", found[0].line), found


@pytest.mark.parametrize(
    "number, collective",
    [
        pytest.param(number, collective, id=f"{number.name}-{collective}", marks=[] if (number, collective) in IN_CI else [pytest.mark.full])
        for number in (signal.SIGSTOP, signal.SIGKILL)
        for collective in COLLECTIVES
    ],
)
def test_a_rank_of_another_host_is_harmed_in_a_collective(tmp_path, collective, number):
    """Three hosts with a rank each: both others name the third, within the time that was set. torchrun needs 30 s more to end a stopped rank."""
    found = told(3, 1, tmp_path, lambda hosts, ranks: os.kill(ranks[2], number), {0, 1}, (collective,), collective == "ring")
    for heard in found.values():
        assert heard.said < SECONDS and heard.status == 1 and heard.ended < heard.said + LEAVING, found
        # Another host's processes cannot be looked at: which of the four it is, is for who goes there.
        assert re.search(r"over ranks 0, 1, 2: rank 2 does not answer \(pid \d+ on h2: killed, stopped, busy elsewhere, or cut off\)", heard.line), found
