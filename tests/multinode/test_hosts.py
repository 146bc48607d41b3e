"""The job over several hosts, started as people do: the launch script on each host, torchrun's c10d rendezvous, TCP between their addresses."""

from __future__ import annotations

import json
import subprocess

import netns_hosts as network
import pytest
from launched import JOB, environment, free_port, run
from loud import skip_outside_ci

QUICK = ("--quick", "--pretrain-steps", "2", "--no-control", "--rounds", "1", "--trainers", "tp1", "--rollouts", "tp1", "--max-new-tokens", "4")
LACKING = network.missing()


@pytest.fixture(autouse=True)
def _needed() -> None:
    if LACKING:
        skip_outside_ci(f"{LACKING}: tests over several hosts")


def test_two_hosts_train_and_agree_with_the_rollout(tmp_path):
    found = run(2, tmp_path, ["--tp", "2", "--ep", "2", *QUICK])
    assert [status for status, _, _ in found] == [0, 0], found
    said = [out.strip().splitlines()[-1] for _, out, _ in found if "logdiff 0 in" in out]
    assert len(said) == 1 and said[0].startswith("logdiff 0 in 2 of 2 pairs"), found
    pairs = json.loads((tmp_path / "out" / "qwen3_moe" / "report.json").read_text())["pairs"]
    assert {pair["nonzero"] for pair in pairs} == {0}


def test_a_host_that_never_comes_is_said(tmp_path):
    with network.hosts(2) as made:
        variables = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": made[0].address, "MASTER_PORT": str(free_port()), "TIO_RENDEZVOUS_SECONDS": "5"}
        process = made[0].start(["bash", JOB, "--tp", "2", *QUICK], environment(tmp_path, **variables), tmp_path)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 2 and len(err.splitlines()) == 1, (process.returncode, out, err)
        assert "1 of 2 hosts" in err or "cannot bring the ranks together" in err, err
        assert not made[0].processes() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "2000"}, "hosts are numbered 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1"}, "MASTER_PORT is not set"),
        ({"NNODES": "two"}, "NNODES must be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "2000"}, "this host cannot reach it"),
        ({"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "2000"}, "do not divide by 3 hosts"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "a[1-3]"}, "do not divide by 3 hosts"),
    ],
)
def test_variables_that_do_not_fit_are_one_line(tmp_path, variables, says):
    done = subprocess.run(["bash", JOB, "--tp", "2", *QUICK], env=environment(tmp_path, **variables), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()
