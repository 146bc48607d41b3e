"""Sums of the size of gradients: whatever could switch with the size (a schedule, a piece, a buffer), the bytes are those of one line of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.collectives.choose import SWITCH_BYTES
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

SWITCH = SWITCH_BYTES // 4
MIDDLE = (65_537, SWITCH, SWITCH + 1, 700_001)
LARGE = (4 << 20) + 3
"""16 MiB and a bit: no number of ranks divides it. The bench's largest, 64 MiB, is among the slow tests."""
ONE_LINE: dict[int, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    2: lambda x: x[0] + x[1],
    3: lambda x: (x[0] + x[1]) + x[2],
    4: lambda x: (x[0] + x[1]) + (x[2] + x[3]),
}
SEQUENCE: dict[int, Callable[[list[torch.Tensor]], torch.Tensor]] = {3: lambda x: x[0] + (x[1] + x[2]), 4: lambda x: ((x[0] + x[1]) + x[2]) + x[3]}


def parts(ranks: int, length: int, seed: int = 5) -> list[torch.Tensor]:
    """What each rank adds: no two runs of elements alike, so that one in another's place shows too."""
    return [torch.randn(length, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(ranks)]


def reduced(x: list[torch.Tensor], lengths: tuple[int, ...], schedules: tuple[str, ...]) -> None:
    """Every schedule on the first ``lengths`` elements, as fp32 and rounded once."""
    whole = ONE_LINE[len(x)](x)

    def rank_main(rank: int) -> None:
        for length in lengths:
            mine, want = x[rank][:length].clone(), whole[:length]
            for schedule in schedules:
                y = collectives.all_reduce(mine, dist.group.WORLD, schedule=schedule)
                assert_same_bytes(y, want, f"{schedule}, {length} numbers")
                half = collectives.all_reduce(mine, dist.group.WORLD, schedule=schedule, out_dtype=torch.bfloat16)
                assert_same_bytes(half, want.bfloat16(), f"{schedule}, {length} numbers, rounded")
            assert_same_bytes(mine, x[rank][:length], "the input")

    run_ranks(len(x), rank_main, timeout=300)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_schedule_above_every_switch(size: int) -> None:
    reduced(parts(size, max(MIDDLE)), MIDDLE, ("auto", "doubling", "scatter", "ring"))


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.full), 4])
def test_sixteen_mebibytes(size: int) -> None:
    reduced(parts(size, LARGE), (LARGE,), ("doubling", "scatter", "ring"))


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sixty_four_mebibytes(size: int) -> None:
    reduced(parts(size, 16 << 20), (16 << 20,), ("doubling", "scatter", "ring"))


@pytest.mark.parametrize("size", [3, 4])
def test_other_orders_and_places_show(size: int) -> None:
    """Negative controls: a sum in sequence, or one element one place further, has other bytes at once."""
    x = parts(size, 700_001)
    want = ONE_LINE[size](x)
    assert first_mismatch(SEQUENCE[size](x), want) is not None
    assert first_mismatch(want.roll(1), want) is not None
    assert first_mismatch(ONE_LINE[size]([each.bfloat16().float() for each in x]).bfloat16(), want.bfloat16()) is not None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_pieces(size: int) -> None:
    """Rows cut unevenly over ranks: some megabytes for one, none for another."""
    x = parts(size, 3 * 400_001)
    counts = [100_001, *[0] * (size - 2), 300_000]
    want = ONE_LINE[size](x).view(-1, 3).split(counts)

    def rank_main(rank: int) -> None:
        mine = x[rank].view(-1, 3)
        for schedule in ("scatter", "ring"):
            y = collectives.reduce_scatter(mine, dist.group.WORLD, splits=counts, schedule=schedule)
            assert_same_bytes(y, want[rank], schedule)
            y = collectives.reduce_scatter(mine, dist.group.WORLD, splits=counts, schedule=schedule, out_dtype=torch.bfloat16)
            assert_same_bytes(y, want[rank].bfloat16(), f"{schedule}, rounded")
        assert_same_bytes(collectives.all_gather(y, dist.group.WORLD, sizes=counts), torch.cat(want).bfloat16(), "gathered")

    run_ranks(size, rank_main, timeout=300)


@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (2, 0, 3, 1), (0, 2, 1, 3), (0, 0, 2, 1)], ids=str)
def test_whoever_owns_a_term(owners: tuple[int, ...]) -> None:
    """Leaf ``i`` lies at rank ``owners[i]``: the sum is that of the leaves, in their order, for every schedule."""
    x, tree, size = parts(4, 700_001), ReductionTree(4), max(owners) + 1
    want = ONE_LINE[4](x)
    leaves = [[leaf for leaf in range(4) if owners[leaf] == rank] for rank in range(size)]
    spans = [[Node(leaf, 1) for leaf in each] for each in leaves]

    def rank_main(rank: int) -> None:
        mine = torch.stack([x[leaf] for leaf in leaves[rank]])
        for schedule in ("doubling", "scatter", "ring"):
            y = collectives.all_reduce_nodes(mine, spans, tree, dist.group.WORLD, schedule=schedule)
            assert_same_bytes(y, want, f"{schedule} {owners}")
        for schedule in ("scatter", "ring"):
            counts = [700_001 - 5 * (size - 1), *[5] * (size - 1)]
            y = collectives.reduce_scatter_nodes(mine, spans, tree, dist.group.WORLD, splits=counts, schedule=schedule)
            assert_same_bytes(y, want.split(counts)[rank], f"{schedule} {owners} scattered")

    run_ranks(size, rank_main, timeout=300)
