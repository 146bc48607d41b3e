"""explain() says what a call does; what it says is what a call then does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.collectives import wire
from tio_megatron.testing import run_ranks


@pytest.mark.parametrize(
    ("size", "order"),
    [(1, "0"), (2, "(0+1)"), (3, "((0+1)+2)"), (4, "((0+1)+(2+3))"), (6, "(((0+1)+(2+3))+(4+5))")],
)
@pytest.mark.parametrize("schedule", ["auto", "doubling", "scatter", "ring"])
def test_order_is_the_same_for_every_schedule(size, order, schedule):
    for shape in ([], [0], [3], [4096, 4096]):
        assert f"\norder: {order} for every element" in collectives.explain(size, shape, schedule=schedule)


def test_words():
    text = collectives.explain(4, [1 << 20], schedule="scatter", out_dtype=torch.bfloat16)
    assert "schedule: scatter\n" in text and "hops: 3\n" in text and "at most 4.5 MiB a rank, 18.0 MiB together" in text and "rounded once to bfloat16" in text
    assert "(((1+2)+3)+0)" in text
    assert "two terms commute" in collectives.explain(2, [4]) and "vendor" not in collectives.explain(None, [4])
    assert "piece 3 (((((((4+5)+6)+7)+0)+1)+2)+3), ..." in collectives.explain(8, [4])


def test_two_ranks_always_double():
    assert "schedule: doubling (auto: two ranks always)\nhops: 1\n" in collectives.explain(2, [1 << 30])
    assert "schedule: scatter (auto: up to 2.0 MiB doubling, above scatter)" in collectives.explain(4, [(1 << 19) + 1])
    assert "schedule: doubling (auto" in collectives.explain(4, [1 << 19])


def test_a_forced_schedule_is_said(monkeypatch):
    monkeypatch.setenv("TIO_COLLECTIVE_SCHEDULE", "ring")
    assert "schedule: ring (TIO_COLLECTIVE_SCHEDULE)" in collectives.explain(4, [4])


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
    assert collectives.explain(4, [512, 2048], schedule="ring") in page


def test_what_it_says_is_what_happens():
    def rank_main(rank):
        for schedule in ("doubling", "scatter", "ring"):
            text = collectives.explain(dist.group.WORLD, [4096], schedule=schedule)
            with wire.count() as traffic:
                collectives.all_reduce(torch.ones(4096), dist.group.WORLD, schedule=schedule)
            yield text, traffic.sent, traffic.rounds

    seen = run_ranks(3, lambda rank: list(rank_main(rank)))
    for step in range(3):
        text = seen[0][step][0]
        assert int(re.search(r"hops: (\d+)", text)[1]) == max(ranks[step][2] for ranks in seen)
        assert 1024 * float(re.search(r"at most ([\d.]+) KiB", text)[1]) == pytest.approx(max(ranks[step][1] for ranks in seen), abs=60)
        assert 1024 * float(re.search(r"([\d.]+) KiB together", text)[1]) == pytest.approx(sum(ranks[step][1] for ranks in seen), abs=60)
