"""A rank that is killed, stopped or raises inside a collective: every other rank ends with an error that names collective, group and rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harmed_worlds import SECONDS, World

from tio_megatron import collectives
from tio_megatron.collectives import failure, last_words
from tio_megatron.collectives.last_words import Heard, Session, Who, Words
from tio_megatron.contract import ReductionTree
from tio_megatron.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3
TREE = ReductionTree(6)
SPANS = [TREE.frontier(0, 3), TREE.frontier(3, 4), TREE.frontier(4, 6)]


def world():
    return dist.group.WORLD


CALLS = {
    "all_reduce (doubling": lambda rank: collectives.all_reduce(torch.ones(30), world(), schedule="doubling"),
    "all_reduce (scatter": lambda rank: collectives.all_reduce(torch.ones(30), world(), schedule="scatter"),
    "all_reduce (ring": lambda rank: collectives.all_reduce(torch.ones(30), world(), schedule="ring"),
    "all_reduce_nodes (doubling": lambda rank: collectives.all_reduce_nodes(torch.ones(len(SPANS[rank]), 30), SPANS, TREE, world()),
    "reduce_scatter (scatter": lambda rank: collectives.reduce_scatter(torch.ones(30), world()),
    "reduce_scatter (ring": lambda rank: collectives.reduce_scatter(torch.ones(30), world(), schedule="ring"),
    "reduce_scatter_nodes (scatter": lambda rank: collectives.reduce_scatter_nodes(torch.ones(len(SPANS[rank]), 30), SPANS, TREE, world()),
    "all_gather (doubling": lambda rank: collectives.all_gather(torch.ones(rank + 1, 30), world(), sizes=[1, 2, 3]),
    "all_to_all": lambda rank: collectives.all_to_all(torch.ones(30), None, None, world()),
    "all_gather": lambda rank: collectives.all_max(torch.ones(30), world()),
}
"""By how the error names them; all_max is an all_gather."""
EXCHANGES = {name: 1 if "scatter" in name.split(" (")[0] and "ring" not in name or name in ("all_to_all", "all_gather") else 2 for name in CALLS}


def check(name, ended, victim, says):
    for rank, found in ended.items():
        if rank == victim:
            continue
        assert found.kind == "CollectiveError" and found.missing == (victim,), (name, rank, found)
        assert name in found.text and "over ranks 0, 1, 2" in found.text and says in found.text, (name, rank, found)
        assert len(found.text.splitlines()) == 1, (name, rank, found)


def test_killed_in_each():
    for victim in (0, 2):
        under_way = {name: World(SIZE, call, victim, "kill", EXCHANGES[name]) for name, call in CALLS.items()}
        for name, found in under_way.items():
            check(name, found.ended(), victim, f"rank {victim} has ended or died")


def test_stopped_in_each():
    """All at once: they wait most of the time."""
    under_way = {name: World(SIZE, call, 1, "stop", EXCHANGES[name]) for name, call in CALLS.items()}
    for name, found in under_way.items():
        check(name, found.ended(), 1, "rank 1 is stopped")


def test_raised_in_each():
    under_way = {name: World(SIZE, call, 1, "raise", EXCHANGES[name]) for name, call in CALLS.items()}
    for name, found in under_way.items():
        ended = found.ended()
        assert ended[1].kind == "MemoryError"
        check(name, ended, 1, "rank 1 has left with MemoryError: no room for the third piece (in ")


def test_killed_in_the_middle_of_the_bytes():
    def work(rank):
        collectives.all_reduce(torch.ones(2 << 20), world(), schedule="scatter")

    check("all_reduce (scatter", World(SIZE, work, 1, "kill", after=0.01).ended(), 1, "rank 1 has ended or died")


def test_who_lost_only_the_messenger_names_the_missing():
    """Rank 0 is in no group with rank 3, and learns from rank 2 (lost over another group) why that one left."""
    groups = {}

    def work(rank):
        if not groups:
            for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]):
                made = dist.new_group(ranks)
                if rank in ranks:
                    groups["tensor" if ranks[1] - ranks[0] == 1 else "data"] = made
        collectives.all_reduce(torch.ones(3), groups["tensor"])
        collectives.all_reduce(torch.ones(3), groups["data"])

    ended = World(4, work, 3, "kill").ended()
    assert {found.missing for found in ended.values()} == {(3,)}, ended
    assert "over ranks 0, 2: rank 2 has left: all_reduce (doubling, exchange 1 of 1) over ranks 2, 3: rank 3 has ended or died" in ended[0].text, ended


def test_a_late_rank_is_told_that_the_others_gave_up():
    def work(rank):
        if rank == 1 and work.times == 2:
            time.sleep(SECONDS)
        work.times += 1
        collectives.all_reduce(torch.ones(3), world())

    work.times = 0
    ended = World(2, work, -1, "none").ended()
    assert ended[0].missing == (1,) and "rank 1 does not answer (pid " in ended[0].text and "which runs" in ended[0].text, ended
    assert ended[1].missing == () and "rank 0 gave up waiting for this rank, which came late" in ended[1].text, ended


PROGRAM = """
import datetime, os, sys, torch, torch.distributed as dist
from tio_megatron import collectives
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30))
collectives.all_reduce(torch.ones(3), dist.group.WORLD)
if rank:
    raise KeyError("a bug of rank 1" + " and much about it" * 100)
collectives.all_reduce(torch.ones(3), dist.group.WORLD)
"""


QUIET_ENDS = ("sys.exit(0)", "dist.destroy_process_group(); sys.exit(0)")
EARLY = PROGRAM.replace('raise KeyError("a bug of rank 1" + " and much about it" * 100)', "{}")


@pytest.mark.parametrize("end", ["sys.exit(3)", *(pytest.param(end, marks=pytest.mark.full) for end in QUIET_ENDS)])
def test_a_rank_that_ends_early_without_an_error(tmp_path, end):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "TIO_COLLECTIVE_SECONDS": str(SECONDS)}
    words = [[sys.executable, "-c", EARLY.format(end), str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    started = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in words]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [1, 3 if "3" in end else 0] and not said[1], said
    assert "over ranks 0, 1: rank 1 has ended early, without an error: the end of the program, or sys.exit; rank 0 noticed" in said[0], said


def test_an_error_between_collectives_is_heard_too(tmp_path):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "TIO_COLLECTIVE_SECONDS": str(SECONDS)}
    words = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    started = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in words]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1]
    assert "tio_megatron.collectives.failure.CollectiveError: all_reduce (doubling, exchange 1 of 1) over ranks 0, 1: " in said[0].splitlines()[-1], said
    assert "rank 1 has left with KeyError: 'a bug of rank 1" in said[0] and len(said[0].splitlines()[-1]) < 1200, said[0]
    assert "KeyError" in said[1].splitlines()[-1], "its own traceback is as it was"


def test_the_setting(monkeypatch):
    assert failure.seconds() == failure.SECONDS == 600
    monkeypatch.setenv("TIO_COLLECTIVE_SECONDS", "10")
    assert (failure.seconds(), failure.patience()) == (10, 7.5)
    for text in ("0", "-1", "soon", "nan", "inf", "1e9"):
        monkeypatch.setenv("TIO_COLLECTIVE_SECONDS", text)
        with pytest.raises(ValueError, match="TIO_COLLECTIVE_SECONDS=.* is not a number of seconds"):
            failure.seconds()


def test_an_error_of_the_caller_reaches_nobody(monkeypatch):
    """What is refused before anything is sent leaves the group whole."""

    def rank_main(rank):
        with pytest.raises(ValueError):
            collectives.all_reduce(torch.ones(3, dtype=torch.int32), world())
        assert collectives.all_reduce(torch.ones(3), world()).tolist() == [2, 2, 2]
        return last_words.session().said

    assert run_ranks(2, rank_main) == [False, False]


def who(rank, machine="this", network="this", pid=0):
    here = last_words._here()
    return Who(
        rank,
        f"host{rank}",
        here[0] if machine == "this" else machine,
        here[1] if network == "this" else network,
        pid or os.getpid(),
        last_words._process(os.getpid())[1],
    )


class Deaf(Session):
    """A session without a store."""

    def __init__(self):
        self.rank, self.who, self.said = 0, {}, False


@pytest.mark.parametrize(
    ("heard", "missing", "says"),
    [
        (Heard({1: Words(1, "a")}, {2: who(2, "other")}, True), (2,), "rank 2 does not answer (pid .* on host2: killed, stopped, busy elsewhere, or cut off)"),
        (Heard({1: Words(1, "a")}, {}, True), (2,), "rank 2 does not answer (it has not come to any collective yet)"),
        (Heard({}, {0: who(0), 1: who(1), 2: who(2, "other", "other")}, False), (2,), "rank 2 does not answer .*is this host's network up"),
        (Heard({}, {}, False), (1, 2), "rank 1 does not answer .*; rank 2 .*nor does the store"),
        (Heard({1: Words(1, "a"), 2: Words(2, "b")}, {}, True), (), "no rank is missing, the connections between them broke"),
        (Heard({1: Words(1, "x", missing=(5,)), 2: Words(2, "b")}, {}, True), (5,), "rank 1 has left: x"),
        (Heard({1: Words(1, "x", missing=(0,)), 2: Words(2, "b")}, {}, True), (), "rank 1 gave up waiting for this rank"),
        (Heard({1: Words(1, "", own=True, ended=True), 2: Words(2, "b")}, {}, True), (1,), "rank 1 has ended early, without an error"),
        (Heard({1: Words(1, "", own=True, ended=True), 2: Words(2, "E: q", own=True)}, {}, True), (2,), "rank 2 has left with E: q"),
        (Heard({1: Words(1, "ValueError: q", own=True)}, {}, True), (1,), "rank 1 has left with ValueError: q"),
    ],
)
def test_what_is_concluded(heard, missing, says):
    found, why = failure._verdict(heard, [1, 2], [1, 2], Deaf())
    assert found == missing and re.search(says.replace("(", r"\(").replace(")", r"\)"), why), (found, why)
