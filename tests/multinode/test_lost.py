"""A host whose cable is pulled, and a rank that is killed on another host: every other rank says in time who is missing."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import netns_hosts as network
import pytest
from loud import skip_outside_ci

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(ROOT / "tests" / "support" / "lost_ranks.py")
SECONDS = 10
LACKING = network.missing()


@pytest.fixture(autouse=True)
def _needed() -> None:
    if LACKING:
        skip_outside_ci(f"{LACKING}: tests over several hosts")


def told(folder: Path, harm, ranks: set[int]) -> dict[int, dict]:
    """What ``ranks`` of two hosts with two ranks each are told after ``harm(hosts, pids)``, and seconds from the harm to that."""
    dropped = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TIO_CONTRACT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TIO_COLLECTIVE_SECONDS": str(SECONDS), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with network.hosts(2) as made:
        for number, host in enumerate(made):
            where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", made[0].address, "--master-port", "29400"]
            host.start([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *where, RANKS, str(folder)], kept, ROOT)
        wait(lambda: len(list(folder.glob("ready-*"))) == 4, 120, folder)
        harmed = time.time()
        harm(made, {rank: int((folder / f"ready-{rank}").read_text()) for rank in range(4)})
        wait(lambda: all((folder / f"lost-{rank}").exists() for rank in ranks), 60, folder)
        found = {rank: json.loads((folder / f"lost-{rank}").read_text()) for rank in ranks}
        return {rank: words | {"seconds": words["at"] - harmed} for rank, words in found.items()}


def wait(done, seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, sorted(path.name for path in folder.iterdir())
        time.sleep(0.05)


def test_a_host_that_is_cut_off(tmp_path):
    found = told(tmp_path, lambda hosts, pids: hosts[1].link(False), {0, 1, 2, 3})
    for rank, words in found.items():
        away = [2, 3] if rank < 2 else [0, 1]
        assert words["missing"] == away and words["seconds"] < SECONDS + 1, found
        assert f"over ranks 0, 1, 2, 3: rank {away[0]} does not answer" in words["text"], found
        assert ("is this host's network up, and the first host's?" in words["text"]) == (rank >= 2), found


def test_a_rank_killed_on_the_other_host(tmp_path):
    found = told(tmp_path, lambda hosts, pids: os.kill(pids[3], signal.SIGKILL), {0, 1})
    for words in found.values():
        # torchrun ends the other rank of that host in the same moment.
        assert 3 in words["missing"] and set(words["missing"]) <= {2, 3} and words["seconds"] < SECONDS, found
        assert "rank 3 has died (pid " in words["text"], found
