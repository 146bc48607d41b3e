"""Variables that the ranks would meet only in the middle of their work are looked at before any is started, and compared between ranks."""

from __future__ import annotations

import pytest

from examples.qwen3_moe import consistency, start
from tio_megatron.integrations.handshake import unusual

BAD = {
    "TIO_COLLECTIVE_SCHEDULE": ("tree", "'tree' is unknown; known are"),
    "TIO_COLLECTIVE_SWITCH_BYTES": ("-1", "is not a whole number of bytes"),
    "TIO_COLLECTIVE_SECONDS": ("abc", "is not a number of seconds"),
    "OMP_NUM_THREADS": ("abc", "must be a whole number of at least 1"),
}


def test_what_is_set_well_is_taken(monkeypatch):
    for name, value in {"TIO_COLLECTIVE_SCHEDULE": "ring", "TIO_COLLECTIVE_SECONDS": "10", "OMP_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)
    start.check_variables()


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_cannot_work_is_refused_by_name(monkeypatch, name):
    value, says = BAD[name]
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        start.check_variables()


@pytest.mark.parametrize("name, value", [("TIO_COLLECTIVE_SCHEDULE", "ring"), ("TIO_COLLECTIVE_SWITCH_BYTES", "8"), ("TIO_COLLECTIVE_SECONDS", "33")])
def test_ranks_compare_what_decides_their_messages(monkeypatch, name, value):
    options = consistency.parse(["--layouts", "dp2"])
    monkeypatch.delenv(name, raising=False)
    mine = start.facts(options)
    monkeypatch.setenv(name, value)
    theirs = start.facts(options)
    assert {field for field in mine if mine[field] != theirs[field]} == {name}
    assert any(f"{name} is {value}" in line for line in unusual([mine, mine, theirs], ["rank 0", "rank 1", "rank 2"]))
