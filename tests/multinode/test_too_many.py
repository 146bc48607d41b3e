"""A host too many: two with the same number. The one that comes last is told so at once, and the run goes on."""

from __future__ import annotations

import netns_hosts as network
import pytest
from launched import JOB, environment, free_port

pytestmark = pytest.mark.usefixtures("several_hosts")


def test_a_number_given_twice(tmp_path):
    words = ["bash", JOB, "consistency", "--soak", "600", "--layouts", "dp2"]
    shared = {"NNODES": "2", "MASTER_PORT": str(free_port()), "TIO_RENDEZVOUS_SECONDS": "360", "NPROC_PER_NODE": "1"}
    with network.hosts(3) as made:
        variables = shared | {"MASTER_ADDR": made[0].address}
        first, second = (made[number].start(words, environment(tmp_path, NODE_RANK=str(number), **variables), tmp_path) for number in (0, 1))
        assert first.stdout.readline().startswith("2 ranks on 2 hosts: every collective has come back once")
        third = made[2].start(words, environment(tmp_path, NODE_RANK="1", **variables), tmp_path)
        said, wrong = third.communicate(timeout=120)
        says = f"qwen3_moe: error: this run at {made[0].address}:{shared['MASTER_PORT']} already has its host number 1 of 2: is NODE_RANK 1 given twice"
        assert third.returncode == 2 and not said and wrong.startswith(says) and len(wrong.splitlines()) == 1, (third.returncode, said, wrong)
        assert first.poll() is None and second.poll() is None, "the run goes on"
