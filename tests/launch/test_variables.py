"""Variables that the ranks would meet only in the middle of their work are looked at before any is started, and compared between ranks."""

from __future__ import annotations

import socket

import pytest

from examples.qwen3_moe import agreement, consistency_options, early, hosts

BAD = {
    "TIO_COLLECTIVE_SCHEDULE": ("tree", "'tree' is unknown; known are"),
    "TIO_COLLECTIVE_SWITCH_BYTES": ("-1", "is not a whole number of bytes"),
    "TIO_COLLECTIVE_SECONDS": ("abc", "is not a number of seconds"),
    "OMP_NUM_THREADS": ("abc", "must be a whole number of threads"),
    "GLOO_SOCKET_IFNAME": ("nope0", "this host has no interface 'nope0'; it has .*lo"),
}


def test_what_is_set_well_is_taken(monkeypatch):
    for name, value in {"TIO_COLLECTIVE_SCHEDULE": "ring", "TIO_COLLECTIVE_SECONDS": "10", "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    early.check_variables()


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_cannot_work_is_refused_by_name(monkeypatch, name):
    value, says = BAD[name]
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        early.check_variables()


@pytest.mark.parametrize("name, value", [("TIO_COLLECTIVE_SCHEDULE", "ring"), ("TIO_COLLECTIVE_SWITCH_BYTES", "8"), ("TIO_COLLECTIVE_SECONDS", "33")])
def test_ranks_compare_what_decides_their_messages(monkeypatch, name, value):
    options = consistency_options.parse(["--layouts", "dp2"])
    monkeypatch.delenv(name, raising=False)
    mine = agreement.facts(options)
    monkeypatch.setenv(name, value)
    theirs = agreement.facts(options)
    assert {field for field in mine if mine[field] != theirs[field]} == {name}
    assert any(f"{name} is {value}" in line for line in agreement.unusual([mine, mine, theirs], ["rank 0", "rank 1", "rank 2"]))


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "nowhere.invalid,b"}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"SLURM_NODEID": "2"}, "^SLURM_NODEID 2: with SLURM_NNODES 2 hosts are numbered 0 to 1"),
        ({"SLURM_NODEID": "2", "NNODES": "1"}, ""),
        ({"SLURM_NODEID": ""}, r"^NODE_RANK is not set \(SLURM_NODEID neither\)"),
        ({"SLURM_NNODES": "two"}, "^SLURM_NNODES must be a whole number at least 1, got 'two'"),
        ({"SLURM_JOB_NODELIST": ""}, r"^SLURM_JOB_NODELIST names no host \(''\), and MASTER_ADDR is not set either: with SLURM_NNODES 2"),
        ({}, "^SLURM_JOB_NODELIST nowhere.invalid: this host cannot reach it"),
        ({"MASTER_ADDR": "elsewhere.invalid"}, "^MASTER_ADDR elsewhere.invalid: this host cannot reach it"),
        ({"SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "192.0.2.7"}, "^SLURM_JOB_NODELIST 192.0.2.7: .*name another by MASTER_ADDR|cannot reach it"),
        ({"NNODES": "9" * 5000}, r"^NNODES must be a whole number at least 1, got '9{59}\.\.\.$"),
    ],
)
def test_messages_name_the_variables_that_slurm_has_set(change, says):
    if not says:
        assert hosts.from_environment(SLURM | change).count == 1
        return
    with pytest.raises(ValueError, match=says):
        place = hosts.from_environment(SLURM | change)
        place.listen()
        place.torchrun("run")


def test_a_port_chosen_by_slurms_number_is_said_to_be(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(hosts, "SLURM_PORTS", range(port, port + 1))
        place = hosts.from_environment(SLURM | {"SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "127.0.0.1"})
        with pytest.raises(ValueError, match=f"^the port chosen by SLURM_JOB_ID, {port}: cannot be listened on .* free there .MASTER_PORT.$"):
            place.listen()


@pytest.mark.parametrize("name", ["..", "a" * 300])
def test_an_address_that_is_no_name_is_refused_by_its_variable(name):
    with pytest.raises(ValueError, match="^MASTER_ADDR .*this host cannot reach it"):
        hosts.own_address(name, 2000)
