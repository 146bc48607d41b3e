"""The first host's launcher is stopped (Ctrl-Z) while the others wait inside torch for its store: they end within their limit, and hear signals."""

from __future__ import annotations

import os
import signal
import time

import launched
import netns_hosts as network
import pytest

pytestmark = pytest.mark.usefixtures("several_hosts")
WORDS = ["consistency", "--soak", "5", "--layouts", "dp3"]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("signalled", [False, True])
def test_a_host_that_waits_for_a_stopped_first_host_ends(tmp_path, signalled):
    """Two of three hosts have come."""
    with network.hosts(2) as made:
        shared = {"NNODES": "3", "MASTER_ADDR": made[0].address, "MASTER_PORT": str(launched.free_port()), "NPROC_PER_NODE": "1"}
        shared |= {"TIO_RENDEZVOUS_SECONDS": "300" if signalled else "36"}
        first, second = (
            made[number].start(["bash", launched.JOB, *WORDS], launched.environment(tmp_path, NODE_RANK=str(number), **shared), tmp_path) for number in (0, 1)
        )
        time.sleep(9)  # both wait in torch's rendezvous, which shows nothing
        assert first.poll() is None and second.poll() is None
        os.kill(launched.launcher_on(made[0]), signal.SIGSTOP)
        time.sleep(3)
        if signalled:
            os.kill(launched.launcher_on(made[1]), signal.SIGTERM)
        out, wrong = second.communicate(timeout=120)
        os.kill(launched.launcher_on(made[0]), signal.SIGCONT)
        os.kill(launched.launcher_on(made[0]), signal.SIGTERM)
        _, firsts = first.communicate(timeout=300)
    if signalled:
        assert second.returncode == 128 + signal.SIGTERM and wrong == "qwen3_moe: ended by SIGTERM\n", (second.returncode, out, wrong)
    else:
        assert second.returncode == 2 and len(wrong.splitlines()) == 1, (second.returncode, out, wrong)
        assert "torchrun cannot bring the ranks together" in wrong and "is the first host's launcher stopped?" in wrong, wrong
    assert first.returncode == 128 + signal.SIGTERM and len(firsts.splitlines()) < 2, (first.returncode, firsts)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_host_whose_rank_is_lost_does_not_wait_for_a_stopped_first_host(tmp_path):
    with network.hosts(2) as made:
        words = ["consistency", "--soak", "600", "--layouts", "dp2"]
        first, second = launched.start(made, tmp_path, words, NPROC_PER_NODE="1", MAX_RESTARTS="2", TIO_RENDEZVOUS_SECONDS="15", TIO_COLLECTIVE_SECONDS="10")
        assert first.stdout.readline().startswith("2 ranks on 2 hosts: every collective has come back once")
        os.kill(launched.launcher_on(made[0]), signal.SIGSTOP)
        os.kill(launched.ranks_on(made[1])[1], signal.SIGKILL)
        _, wrong = second.communicate(timeout=300)
        assert second.returncode == 1 and "torchrun cannot go on: the store at" in wrong.splitlines()[-1], (second.returncode, wrong)
        assert "is the first host's launcher stopped?" in wrong.splitlines()[-1]
        os.kill(launched.launcher_on(made[0]), signal.SIGKILL)
        first.communicate(timeout=300)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_that_come_together_while_the_launcher_of_rank_0_is_stopped_end(tmp_path):
    """It is not the first host's: the store of the run lives, the one in which the ranks meet does not answer."""
    with network.hosts(2) as made:
        words = ["consistency", "--soak", "20", "--layouts", "dp2"]
        numbered = made[::-1]  # the first host has the higher address, so rank 0 is on the other
        first, second = launched.start(numbered, tmp_path, words, NPROC_PER_NODE="1", TIO_RENDEZVOUS_SECONDS="30", TIO_COLLECTIVE_SECONDS="10")
        deadline = time.monotonic() + 60
        while not launched.ranks_on(numbered[1]) and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher = launched.launcher_on(numbered[1])
        os.kill(launcher, signal.SIGSTOP)  # its rank has begun to import, and has not asked the store
        out, wrong = first.communicate(timeout=120)
        os.kill(launcher, signal.SIGKILL)
        second.communicate(timeout=300)
    assert first.returncode in (1, 2) and "says nothing" in wrong and not out, (first.returncode, out, wrong)
