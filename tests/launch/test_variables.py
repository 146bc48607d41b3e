"""Variables that the ranks would meet only in the middle of their work are looked at before any is started, and compared between ranks."""

from __future__ import annotations

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
    assert any(f"{name} is {value}" in line for line in agreement.differences([mine, mine, theirs], range(3)))


@pytest.mark.parametrize("name", ["..", "a" * 300])
def test_an_address_that_is_no_name_is_refused_by_its_variable(name):
    with pytest.raises(ValueError, match="^MASTER_ADDR .*this host cannot reach it"):
        hosts.own_address(name, 2000)
