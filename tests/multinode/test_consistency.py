"""The same bytes whatever hosts the ranks are on: one host with 4 ranks, 2 hosts x 2, 4 hosts x 1, other orders, a network with faults, one process.

What runs is ``launch/qwen3_moe.sh consistency``, which people run on their own hosts, by torchrun's static rendezvous.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import launched
import netns_hosts as network
import pytest

LAYOUTS = ("tp4+ep4", "tp2+dp2+ep4", "pp2+tp2+ep2")
"""Tensor and expert parallel groups across hosts, and pipeline stages on hosts of their own."""
SIZES = 4
pytestmark = pytest.mark.usefixtures("several_hosts")
PLACES = {"one host": (1, "4 ranks on 1 host"), "two hosts": (2, "4 ranks on 2 hosts"), "four hosts": (4, "4 ranks on 4 hosts")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process trains, and the log-probabilities that it gives then, as one digest."""
    folder = tmp_path_factory.mktemp("alone")
    words = ["bash", launched.JOB, "consistency", "--layouts", "tp1", "--sizes"]
    done = subprocess.run(words, env=launched.environment(folder), cwd=folder, capture_output=True, text=True, timeout=240)
    found = re.search(r"1 rank on 1 host: the bytes of one process in 1 of 1 layouts \(.* ([0-9a-f]{64})\)$", done.stdout.strip())
    assert done.returncode == 0 and found, done
    return found[1]


def check(found: list[launched.Ended], alone: str, places: str, layouts: int) -> None:
    """Every host has ended well, and one of them has said that all is as in one process."""
    assert [status for status, _, _ in found] == [0] * len(found), found
    (said,) = [out for _, out, _ in found if out]
    assert f"{places}: the bytes of one process in {layouts} of {layouts} layouts (" in said, said
    assert said.strip().endswith(f"2 steps, {alone}); the tree's in {SIZES} of {SIZES} sizes"), said
    # The vendor's sum has another order: what compares the digests would notice. One number a rank is added alike by chance.
    assert len(re.findall(r"by every schedule; torch's own all-reduce: [0-9a-f]{16}\n", said)) >= SIZES - 1, said


@pytest.mark.parametrize("place, layouts", [("two hosts", LAYOUTS[2:]), *(pytest.param(place, LAYOUTS, marks=pytest.mark.full) for place in PLACES)])
def test_hosts_change_no_byte(alone, place, layouts, tmp_path):
    hosts, places = PLACES[place]
    check(launched.run(hosts, tmp_path, ["consistency", "--layouts", *layouts, "--expect", alone]), alone, places, len(layouts))


@pytest.mark.full
def test_four_hosts_in_another_order_change_no_byte(alone, tmp_path):
    found = launched.run(4, tmp_path, ["consistency", "--layouts", LAYOUTS[2], "--expect", alone], backwards=True)
    check(found, alone, "4 ranks on 4 hosts", 1)
    assert [bool(out) for _, out, _ in found] == [True, False, False, False], "rank 0 is on the host of NODE_RANK 0"


@pytest.mark.full
def test_a_network_with_faults_changes_no_byte(alone, tmp_path, capsys):
    with capsys.disabled():
        print(f"\nfaults of the network by {network.who_makes_faults()}: {network.Faults()}")
    found = launched.run(2, tmp_path, ["consistency", "--layouts", LAYOUTS[0], "--expect", alone], faults=network.Faults())
    check(found, alone, "4 ranks on 2 hosts", 1)


@pytest.mark.full
def test_the_run_compares_itself_with_one_process(alone, tmp_path):
    """As people start it, without --expect; the control is another number of steps."""
    found = launched.run(2, tmp_path, ["consistency", "--layouts", "ep2", "--expect", alone, "--steps", "1", "--sizes", "5"])
    assert [status for status, _, _ in found] == [1, 1] and any("in 0 of 1 layouts" in out for _, out, _ in found), found
    found = launched.run(2, tmp_path, ["consistency", "--layouts", "ep2", "--sizes", "5"])
    assert [status for status, _, _ in found] == [0, 0] and any(f", {alone}); the tree's in 1 of 1 sizes" in out for _, out, _ in found), found


@pytest.mark.full
def test_stock_differs(tmp_path):
    found = launched.run(2, tmp_path, ["consistency", "--stock", "--layouts", *LAYOUTS[:2], "--sizes", "7"])
    said = "".join(out for _, out, _ in found)
    digests = re.findall(r"^\[ *[0-9.]+ s\] .* s; ([0-9a-f]{64})$", said, re.MULTILINE)
    assert [status for status, _, _ in found] == [1, 1] and len(set(digests)) == 2, found
    assert "4 ranks on 2 hosts: the bytes of one process in 0 of 2 layouts (stock, " in said, found


@pytest.mark.full
def test_a_soak_ends_in_time_and_finds_nothing(tmp_path: Path):
    found = launched.run(2, tmp_path, ["consistency", "--soak", "1", "--layouts", "dp2"])
    assert [status for status, _, _ in found] == [0, 0], found
    assert any(re.search(r"2 ranks on 2 hosts: \d+ collectives in 1 s, 0 with other bytes", out) for _, out, _ in found), found


@pytest.mark.parametrize(
    "words, says",
    [
        (["--layouts", "tp2", "dp4"], "--layouts dp4: 4 ranks, and tp2 has 2; all must have the same number"),
        (["--expect", "12"], "--expect must be 64 hexadecimal digits"),
        (["--sizes", "0"], "must be at least 1"),
        (["--soak", "-1"], "--soak must be a number of seconds"),
        (["--layouts", "tp3"], "tp3"),
    ],
)
def test_bad_options_are_one_line(tmp_path, words, says):
    done = subprocess.run(["bash", launched.JOB, "consistency", *words], env=launched.environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
