"""A host takes its number in the store of the run: what another of that number hears, a successor, hosts that disagree, a first host that is not there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError

from examples.qwen3_moe import arrival, ending, starts
from examples.qwen3_moe.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch) -> Iterator[Hosts]:
    """A run of two hosts whose store is here; this is number 1."""
    monkeypatch.setattr(arrival, "_SILENT", 2.0)
    server = socket.create_server(("127.0.0.1", 0))
    port = int(server.getsockname()[1])
    store = starts.store_at("127.0.0.1", server, timedelta(seconds=10))
    yield Hosts(2, 1, "127.0.0.1", port, 10)
    del store


def test_a_number_given_twice_is_refused_and_a_successor_is_not(run):
    first = arrival.Arrival(run)
    with pytest.raises(arrival.Refused, match="already has its host number 1 of 2: is NODE_RANK 1 given twice"):
        arrival.Arrival(run)
    other = arrival.Arrival(Hosts(2, 0, run.address, run.port, 10))  # the control: another number
    assert other.absent() == [] and other.lost() == [] and first.stop()
    assert other.lost() == [1]
    again = arrival.Arrival(run)  # the number beats no more: a host that was lost comes again
    assert other.lost() == [] and again.stop() and other.stop()


def test_hosts_that_disagree_on_how_many_they_are(run):
    first = arrival.Arrival(run)
    assert first.absent() == [0]
    with pytest.raises(arrival.Refused, match="NNODES is 3 here and 2 on the hosts that have come"):
        arrival.Arrival(Hosts(3, 2, run.address, run.port, 10))
    assert first.stop()


def test_a_first_host_that_is_not_there_is_said_within_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with pytest.raises(arrival.Refused, match=rf"does not answer at port {port} \(Connection refused\); waited 1 s for 2 hosts"):
        arrival.Arrival(Hosts(2, 1, "127.0.0.1", port, 1))


def test_what_torch_says_of_a_lost_host_is_said_in_our_words(run, monkeypatch):
    """torch names the network's address for the host's; and a host that had come is no mistake of the input."""
    place, torchs = Hosts(2, 1, "10.77.0.1", 29500), f"failed to connect to 10.77.0.0:43485 (errno: {errno.EHOSTUNREACH} - No route to host)"
    assert arrival.why(place, dist.DistNetworkError(torchs)) == ("10.77.0.1:29500: No route to host", 2)
    here = arrival.Arrival(run)
    monkeypatch.setattr(arrival, "_here", [here])
    assert arrival.why(place, dist.DistNetworkError(torchs)) == ("a host that had come is lost (10.77.0.1:29500: No route to host): is its network up?", 1)
    lost = RendezvousConnectionError("The connection to the C10d store has failed.")
    assert arrival.why(run, lost) == (f"the store at 127.0.0.1:{run.port} is lost: has the first host ended, or is its network down?", 1)
    assert arrival.why(run, RendezvousTimeoutError()) == ("1 of 2 hosts have come, missing: NODE_RANK 0", 2)
    assert here.stop()


def test_a_node_on_torchs_list_of_redundant_ones_waits_no_longer_than_its_limit(monkeypatch):
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    monkeypatch.setattr(torchs._RendezvousJoinOp, "__call__", torchs._RendezvousJoinOp.__call__)  # put back afterwards
    found = arrival.limit_redundant_hosts()
    node, state = torchs._NodeDesc("here", 1, 0), torchs._RendezvousState()
    state.redundancy_list.add(node)
    state.participants = {torchs._NodeDesc("there", 1, 0): 0}
    settings = torchs.RendezvousSettings("run", 1, 1, torchs.RendezvousTimeout(), timedelta(seconds=5), 3)
    context, join = torchs._RendezvousContext(node, state, settings), torchs._RendezvousJoinOp()
    assert join(context, time.monotonic() + 60) in (torchs._Action.KEEP_ALIVE, torchs._Action.SYNC) and not found()
    assert join(context, time.monotonic() - 1) == torchs._Action.ERROR_TIMEOUT and found()


COMES = """
import sys
from examples.qwen3_moe import arrival, ending
from examples.qwen3_moe.hosts import Hosts
try:
    arrival.come(Hosts(2, 1, "127.0.0.1", int(sys.argv[1]), 2))
except arrival.Refused as problem:
    ending.say(f"error: {problem}", 2)
arrival.leave(2)
"""


def test_a_port_at_which_nobody_says_anything_ends_within_the_limit():
    """Another program's, or that of a first host whose launcher is stopped: it accepts, and torch would wait for its word for ever, deaf to signals."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-W", "ignore", "-c", COMES, str(server.getsockname()[1])]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 2 and "does not answer as the first host does; waited 2 s for 2 hosts" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_coming_raises_what_arriving_does(run, monkeypatch):
    monkeypatch.setattr(arrival, "_here", [])
    arrival.come(run)
    with pytest.raises(arrival.Refused, match="already has its host number 1 of 2"):
        arrival.come(run)
    assert len(arrival._here) == 1 and not arrival._stuck and arrival.leave(0) == 0


def test_hosts_that_gave_up_are_named_so(run, monkeypatch):
    monkeypatch.setattr(arrival, "_here", [arrival.Arrival(run)])
    assert arrival.why(run, RendezvousClosedError()) == ("the other hosts have ended this run: see what they say", 1)
    assert arrival.why(run, dist.DistStoreError("wait timeout after 8000ms, keys: /x")) == ("1 of 2 hosts have come, missing: NODE_RANK 0", 2)
    assert arrival.leave(0) == 0


def test_a_runs_store_that_says_nothing_is_said_within_the_limit(monkeypatch):
    """Rank 0 asks it whether the run had begun, and need not be on the first host, whose launcher may be stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("QWEN3_MOE_RUN_STORE", f"127.0.0.1 {silent.getsockname()[1]}")
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
        monkeypatch.setenv("TIO_COLLECTIVE_SECONDS", "4")
        with pytest.raises(ending.InputProblem, match="the store of the run at 127.0.0.1:.* says nothing, waited 3 of 4 s"):
            starts.begun(dist.HashStore())
    monkeypatch.delenv("QWEN3_MOE_RUN_STORE")
    store = dist.HashStore()
    assert not starts.begun(store)
    starts.begin(store)
    assert starts.begun(store)
