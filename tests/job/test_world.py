"""The job's ranks when one of them is killed, stopped or fails while rank 0 works alone and the others wait: each says who is missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
TOGETHER = b"together\n"
PROGRAM = """
import os, signal, sys, time
from examples.qwen3_moe.ending import leave
from examples.qwen3_moe.world import World
from tio_megatron.collectives import CollectiveError

harm, victim = sys.argv[1], int(sys.argv[2])
world = World()
assert world.from_first(lambda: 7) == 7
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

if victim and world.rank == victim:
    os.kill(os.getpid(), getattr(signal, harm))
try:
    said = world.from_first(at_work)
except CollectiveError as error:
    said = f"{error.missing} {error}"
print(said, flush=True)
leave(0)
"""


def start(harm, victim):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    kept |= {"PYTHONPATH": str(ROOT), "TIO_COLLECTIVE_SECONDS": str(SECONDS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    kept |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"}
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
    """Each begins when the one before is together, so that a slow machine starts three at a time; from there on they wait, side by side.

    With rank 0 goes the store, which it holds when there is no torchrun.
    """
    started = {}
    try:
        for harm, victim, _ in (*CASES, ("long", 0, "")):
            started[harm, victim] = start(harm, victim)
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


def test_who_does_not_come_at_all_is_named(tmp_path):
    """No torchrun, and one of two ranks is never started: either is said by the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    started = []
    for rank, its_port in ((0, port), (1, str(int(port) + 1 if int(port) < 65535 else 1024))):
        more = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": its_port}
        more |= {"PYTHONPATH": str(ROOT), "TIO_COLLECTIVE_SECONDS": str(SECONDS), "PYTHON": sys.executable, "TIO_CACHE": str(tmp_path / "cache")}
        command = ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), "--tp", "2", "--ep", "2", "--quick", "--out", str(tmp_path / "out")]
        started.append(subprocess.Popen(command, env=os.environ | more, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    says = ["not all 2 ranks have come within 7.5 of 10 s (TIO_COLLECTIVE_SECONDS)", "rank 0 has not come within 7.5 of 10 s (TIO_COLLECTIVE_SECONDS)"]
    for process, wanted in zip(started, says, strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2 and wanted in errors and len(errors.splitlines()) == 1, errors
    assert not (tmp_path / "out").exists()
