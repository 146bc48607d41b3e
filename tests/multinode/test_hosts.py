"""The job over several hosts, started as people do: the launch script on each host, torchrun's static rendezvous, TCP between their addresses."""

from __future__ import annotations

import json
import subprocess
import time

import netns_hosts as network
import pytest
from launched import JOB, environment, free_port, run, start

QUICK = ("--quick", "--pretrain-steps", "2", "--no-control", "--rounds", "1", "--trainers", "tp1", "--rollouts", "tp1", "--max-new-tokens", "4")
pytestmark = pytest.mark.usefixtures("several_hosts")


def test_two_hosts_train_and_agree_with_the_rollout(tmp_path):
    found = run(2, tmp_path, ["--tp", "2", "--ep", "2", *QUICK])
    assert [status for status, _, _ in found] == [0, 0], found
    said = [out.strip().splitlines()[-1] for _, out, _ in found if "logdiff 0 in" in out]
    assert len(said) == 1 and said[0].startswith("logdiff 0 in 2 of 2 pairs"), found
    pairs = json.loads((tmp_path / "out" / "qwen3_moe" / "report.json").read_text())["pairs"]
    assert {pair["nonzero"] for pair in pairs} == {0}


def listeners(host: network.Host) -> set[str]:
    """The addresses at which something on the host listens, IPv4 in its usual form."""
    words = ["ip", "netns", "exec", host.name, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    rows = [line.split() for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()]
    held = {row[1].partition(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"}
    return {".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) if len(address) == 8 else address for address in held}


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_listens_but_where_it_was_named(tmp_path, count):
    """Ranks on one host meet on its loopback, over several at the address of MASTER_ADDR; torch alone would listen on every interface."""
    with network.hosts(count) as made:
        processes = start(made, tmp_path, ["consistency", "--soak", "2", "--layouts", "dp2"])
        found: dict[str, set[str]] = {host.name: set() for host in made}
        while any(process.poll() is None for process in processes):
            for host in made:
                found[host.name] |= listeners(host)
            time.sleep(0.05)
        ended = [process.communicate() for process in processes]
        assert [process.returncode for process in processes] == [0] * count, ended
        wanted = [{"127.0.0.1"}] if count == 1 else [{"127.0.0.1", host.address} for host in made]
        for host, allowed in zip(made, wanted, strict=True):
            assert found[host.name] and found[host.name] <= allowed, found
        assert count == 1 or made[0].address in found[made[0].name], found


def test_a_host_that_never_comes_ends_the_run_within_torchruns_limit(tmp_path):
    with network.hosts(2) as made:
        variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": made[0].address, "MASTER_PORT": str(free_port()), "PET_RDZV_CONF": "timeout=5"}
        process = made[1].start(["bash", JOB, "--tp", "2", *QUICK], environment(tmp_path, **variables), tmp_path)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 1 and "timed out after 5" in err, (process.returncode, out, err)
        assert not made[1].processes() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR and MASTER_PORT must name the first host and a free port there, the same on all hosts"),
        ({"NNODES": "two"}, "NNODES must be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "2000"}, "no.such.host.invalid"),
        ({"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "2000"}, "does not divide by 3 hosts"),
    ],
)
def test_variables_that_do_not_fit_are_one_line(tmp_path, variables, says):
    done = subprocess.run(["bash", JOB, "--tp", "2", *QUICK], env=environment(tmp_path, **variables), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()
