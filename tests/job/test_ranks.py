"""A job's ranks when one of them is killed, stopped or fails while rank 0 works alone and the others wait: each says who is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tio_megatron.jobs import ranks
from tio_megatron.jobs.problems import InputProblem

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
TOGETHER = b"together\n"
PROGRAM = """
import os, signal, sys, time
from tio_megatron.collectives import CollectiveError
from tio_megatron.jobs.ranks import Ranks

harm, victim = sys.argv[1], int(sys.argv[2])
ranks = Ranks()
assert ranks.from_first(lambda: 7) == 7
print("together", flush=True)
time.sleep(1)

def at_work():
    if victim == 0:
        if harm == "long":
            time.sleep(float(os.environ["TIO_COLLECTIVE_SECONDS"]) + 2)
            return 8
        os.kill(os.getpid(), getattr(signal, harm))
    time.sleep(2)
    return 8

if victim and ranks.rank == victim:
    os.kill(os.getpid(), getattr(signal, harm))
try:
    said = ranks.from_first(at_work)
except CollectiveError as error:
    said = f"{error.missing} {error}"
print(said, flush=True)
os._exit(0)
"""


def variables(store, size):
    """Those of a rank whose launcher keeps the store, as torchrun's does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    kept |= {"PYTHONPATH": str(ROOT), "TIO_COLLECTIVE_SECONDS": str(SECONDS), "TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"}
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return kept | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def new_store():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def start(store, harm, victim):
    kept = variables(store, 3)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, harm, str(victim)]
    pipe = subprocess.PIPE
    return [subprocess.Popen(command, env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True) for rank in range(3)]


def first_bytes(process):
    """As many as TOGETHER has and no more, past Python's buffers: communicate() would not see what those hold."""
    said = b""
    while len(said) < len(TOGETHER) and (more := os.read(process.stdout.fileno(), len(TOGETHER) - len(said))):
        said += more
    return said


CASES = [
    ("SIGKILL", 0, "rank 0 has ended or died"),
    ("SIGSTOP", 0, "rank 0 is stopped"),
    ("SIGKILL", 2, "rank 2 has ended or died"),
    ("SIGSTOP", 2, "rank 2 is stopped"),
]


@pytest.fixture(scope="module")
def worlds():
    """Each begins when the one before is together, so that a slow machine starts three at a time; from there on they wait, side by side."""
    started, stores = {}, []
    try:
        for harm, victim, _ in (*CASES, ("long", 0, "")):
            stores.append(new_store())
            started[harm, victim] = start(stores[-1], harm, victim)
            for process in started[harm, victim]:
                if (said := first_bytes(process)) != TOGETHER:
                    raise AssertionError(f"{harm} of rank {victim}, before anything was done to it: {said!r} {process.stderr.read()}")
        yield started
    finally:
        for processes in started.values():
            for process in processes:
                process.kill()
                process.communicate()


@pytest.mark.parametrize("harm, victim, says", CASES)
def test_every_other_rank_says_who_is_missing(worlds, harm, victim, says):
    for rank, process in enumerate(worlds[harm, victim]):
        if rank == victim:
            continue
        out, errors = process.communicate(timeout=120)
        assert out.startswith(f"({victim},) what rank 0 made alone over ranks 0, 1, 2: {says}"), (out, errors)


def test_rank_0_may_work_for_longer_than_any_collective(worlds):
    for process in worlds["long", 0]:
        out, errors = process.communicate(timeout=120)
        assert out.strip() == "8", (out, errors)


def test_who_does_not_come_at_all_is_named(monkeypatch):
    store = new_store()
    for name, value in variables(store, 3).items():
        monkeypatch.setenv(name, value)
    for name, value in {"RANK": "1", "TIO_COLLECTIVE_SECONDS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "STARTING_SECONDS", 0.0)
    with pytest.raises(InputProblem, match="the ranks cannot come together: rank 0, 2 of 3 has not come within 2 s"):
        ranks.come_together()


def test_each_start_has_its_own_part_of_the_store(monkeypatch):
    """torchrun keeps one store for all of its starts; what the run has begun is known in the next start, where a rank ran is not."""
    store = new_store()
    for name, value in variables(store, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    seen = []
    for count in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        made = ranks.Ranks()
        seen.append((made.begun, made._store.check(["mark"])))
        made._store.set("mark", "1")
        made.begin()
        made.close()
    assert seen == [(False, False), (True, False)]
