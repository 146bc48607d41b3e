"""The same bytes whatever hosts the ranks are on: one host with 4 ranks, 2 hosts x 2, 4 hosts x 1, other orders, a network with faults, one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import host_ranks
import netns_hosts as network
import pytest
from bad_switch import Faults
from loud import skip_outside_ci

from tio_megatron.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(ROOT / "tests" / "support" / "host_ranks.py")
ROWS = ["tp4+ep4", "tp2+dp2+ep4", "pp2+tp2+ep2"]
"""Tensor and expert parallel groups across hosts, and pipeline stages on hosts of their own."""
SIZES = [1, 1023, 1 << 17, (1 << 17) + 1]
"""Elements a rank; of four ranks' fp32 the third is the last that the automatic choice sends by doubling (2 MiB), the fourth goes by scatter."""
STEPS = 2
LACKING = network.missing()
PLACES = {"one host": (1, 4), "two hosts": (2, 2), "four hosts": (4, 1)}


@pytest.fixture(autouse=True)
def _needed() -> None:
    if LACKING:
        skip_outside_ci(f"{LACKING}: tests over several hosts")


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What one process trains, and the log-probabilities that it gives then."""
    return {"ordered": run_ranks(1, _alone, timeout=300)[0]}


def _alone(rank: int) -> str:
    return host_ranks.trained("tp1", STEPS)


def run(hosts: int, ranks: int, settings: dict, *, faults: Faults | None = None, backwards: bool = False, seconds: float = 300) -> dict:
    """What rank 0 prints; every host ends well. ``backwards``: the last host is torchrun's first node."""
    with network.hosts(hosts, faults) as made:
        order = made[::-1] if backwards else made
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TIO_CONTRACT")}
        environment = kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes = []
        for number, host in enumerate(order):
            where = [
                "--nnodes",
                str(hosts),
                "--node-rank",
                str(number),
                "--master-addr",
                order[0].address,
                "--master-port",
                "29400",
            ]  # in namespaces of our own: nobody else has it
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *where, RANKS, json.dumps(settings)]
            processes.append(host.start(words, environment, ROOT))
        ended = [process.communicate(timeout=seconds) for process in processes]
        assert [process.returncode for process in processes] == [0] * hosts, ended
        (line,) = [line for out, _ in ended for line in out.splitlines() if line.startswith("{")]
        return json.loads(line)


def check(found: dict, alone: dict[str, str]) -> None:
    assert set(found["rows"].values()) == {alone["ordered"]}
    for elements in SIZES:
        by_name = {name.split()[1]: digest for name, digest in found["sums"].items() if name.startswith(f"{elements} ")}
        vendor = by_name.pop("vendor")
        assert len(set(by_name.values())) == 1, (elements, by_name)
        assert elements == 1 or vendor != by_name["tree"], "the vendor's sum has another order: this would notice"


@pytest.mark.parametrize("place", ["two hosts", pytest.param("one host", marks=pytest.mark.full), pytest.param("four hosts", marks=pytest.mark.full)])
def test_hosts_change_no_byte(alone, place):
    hosts, ranks = PLACES[place]
    check(run(hosts, ranks, {"rows": ROWS, "steps": STEPS, "sizes": SIZES}), alone)


@pytest.mark.full
def test_the_order_of_hosts_changes_no_byte(alone):
    check(run(2, 2, {"rows": ROWS[:1], "steps": STEPS, "sizes": SIZES}, backwards=True), alone)


def test_a_network_with_faults_changes_no_byte(alone):
    check(run(2, 2, {"rows": ROWS[:1], "steps": STEPS, "sizes": SIZES}, faults=Faults()), alone)


@pytest.mark.full
def test_stock_differs(alone):
    found = run(2, 2, {"stock": ["tp4+ep4", "tp2+dp2+ep4"], "steps": STEPS})
    assert len({*found["stock"].values(), alone["ordered"].split()[0]}) == 3, found
