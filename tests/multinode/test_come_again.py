"""A launcher is killed in the middle of a run, and its command given again: the run goes on, and ends with the bytes of one that nobody disturbed."""

from __future__ import annotations

import os
import signal

import launched
import netns_hosts as network
import pytest
from short_rl import SHORT, decided, metrics, wait

from tio_megatron.checkpoint import latest_training, training_state

pytestmark = pytest.mark.usefixtures("several_hosts")


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("first_rank_lost", [False, True])
def test_a_launcher_is_killed_and_comes_again(tmp_path, first_rank_lost):
    """torchrun numbers hosts by their addresses: where the first host (the one with the store) has the higher one, rank 0 and its engine are on the other."""
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "killed"
    ((status, _, wrong),) = launched.run(1, tmp_path, ["rl", *SHORT, "--keep-rollouts", "--out", str(undisturbed)], NPROC_PER_NODE="2")
    assert status == 0, wrong
    words = ["rl", *SHORT, "--keep-rollouts", "--out", str(out)]
    with network.hosts(2) as made:
        numbered = made[::-1] if first_rank_lost else made
        shared = {"NNODES": "2", "MASTER_ADDR": numbered[0].address, "MASTER_PORT": str(launched.free_port()), "NPROC_PER_NODE": "1"}
        shared |= {"MAX_RESTARTS": "3", "TIO_RENDEZVOUS_SECONDS": "120", "TIO_COLLECTIVE_SECONDS": "30"}

        def start(number: int):
            return numbered[number].start(["bash", launched.JOB, *words], launched.environment(tmp_path, NODE_RANK=str(number), **shared), tmp_path)

        processes = [start(0), start(1)]
        wait(lambda: len(metrics(out)) == 3, processes)
        assert (0 in launched.ranks_on(numbered[1])) == first_rank_lost
        os.kill(launched.launcher_on(numbered[1]), signal.SIGKILL)
        processes[1].communicate(timeout=300)
        processes[1] = start(1)
        ended = [process.communicate(timeout=400) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ended
    said = "".join(said for said, _ in ended)
    assert "torchrun has started the ranks again: on from step 2" in said and "on policy in 6 of 6 steps" in said, ended
    assert decided(undisturbed) == decided(out)
    files = [training_state(latest_training(folder / "checkpoints"))["files"] for folder in (undisturbed, out)]
    assert files[0] == files[1]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hosts, killed", [(2, 1), (3, 1), (3, 2)])
def test_a_launcher_that_is_killed_and_does_not_come_again_is_named(tmp_path, hosts, killed):
    """By all the others, whichever of them gives up first, and nobody else is."""
    with network.hosts(hosts) as made:
        words = ["consistency", "--soak", "600", "--layouts", f"dp{hosts}"]
        processes = launched.start(made, tmp_path, words, NPROC_PER_NODE="1", MAX_RESTARTS="1", TIO_RENDEZVOUS_SECONDS="25", TIO_COLLECTIVE_SECONDS="10")
        assert processes[0].stdout.readline().startswith(f"{hosts} ranks on {hosts} hosts: every collective has come back once")
        os.kill(launched.launcher_on(made[killed]), signal.SIGKILL)
        processes[killed].communicate(timeout=300)
        ended = [process.communicate(timeout=120)[1].splitlines()[-1] for number, process in enumerate(processes) if number != killed]
    for last in ended:
        assert last.startswith("qwen3_moe: error: torchrun cannot start the ranks again: "), ended
        assert f"a host that had come is lost: NODE_RANK {killed};" in last and "TIO_RENDEZVOUS_SECONDS=25" in last, ended
    assert {process.returncode for number, process in enumerate(processes) if number != killed} == {1}
