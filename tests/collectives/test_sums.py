"""Sums between real processes against the same sum in one: every schedule, every size, every rank has the same bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.testing import assert_same_bytes, first_mismatch, poison, run_ranks

ALL_REDUCE = ("auto", "doubling", "scatter", "ring")
REDUCE_SCATTER = ("auto", "scatter", "ring")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_all_reduce(size, term, total):
    lengths = (0, 1, 2, 3, 7, 63, 64, 65, 1001) if size <= 4 else (1, 17)

    def rank_main(rank):
        group = dist.group.WORLD
        with poison():
            for schedule in ALL_REDUCE:
                for length in lengths:
                    x = term(rank, length)
                    y = collectives.all_reduce(x, group, schedule=schedule)
                    assert_same_bytes(y, total(size, length), f"{schedule} {length}")
                    assert_same_bytes(x, term(rank, length), "the input")
                    half = collectives.all_reduce(x, group, schedule=schedule, out_dtype=torch.bfloat16)
                    assert_same_bytes(half, total(size, length).bfloat16(), f"{schedule} {length} rounded")
                x = term(rank, 6, 10).t()
                assert not x.is_contiguous()
                y = collectives.all_reduce(x, group, schedule=schedule)
                assert_same_bytes(y, total(size, 6, 10).t().contiguous(), f"{schedule} transposed")
                wide = term(rank, 40)
                y = collectives.all_reduce(wide[1::3], group, schedule=schedule)
                assert_same_bytes(y, total(size, 40)[1::3].contiguous(), f"{schedule} every third")
                x = term(rank, 5, 3)
                same = collectives.all_reduce(x, group, schedule=schedule, out=x)
                assert same is x
                assert_same_bytes(x, total(size, 5, 3), f"{schedule} in place")
                assert_same_bytes(collectives.all_reduce(term(rank, 1)[0], group, schedule=schedule), total(size, 1)[0], "a scalar")

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [3, 4])
def test_gloo_and_sequential_orders_differ(size, term, total):
    """Negative controls: what these tests would look like if the order did not matter."""

    def rank_main(rank):
        x = term(rank, 1001)
        dist.all_reduce(x)
        return x

    gloo = run_ranks(size, rank_main)[0]
    assert first_mismatch(gloo, total(size, 1001)) is not None
    if size == 4:  # at three ranks the tree is the sequence
        sequence = term(0, 1001)
        for rank in range(1, size):
            sequence = sequence + term(rank, 1001)
        assert first_mismatch(sequence, total(size, 1001)) is not None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_reduce_scatter(size, term, total):
    splits = [[2] * size, [0] * (size - 1) + [5], [rank % 3 for rank in range(size)], [3, *[1] * (size - 1)]]

    def rank_main(rank):
        group = dist.group.WORLD
        with poison():
            for schedule in REDUCE_SCATTER:
                for counts in splits:
                    rows = sum(counts)
                    x = term(rank, rows, 3)
                    want = total(size, rows, 3).split(counts)[rank]
                    y = collectives.reduce_scatter(x, group, splits=counts, schedule=schedule)
                    assert_same_bytes(y, want, f"{schedule} {counts}")
                    y = collectives.reduce_scatter(x, group, splits=counts, schedule=schedule, out_dtype=torch.bfloat16)
                    assert_same_bytes(y, want.bfloat16(), f"{schedule} {counts} rounded")
                x = term(rank, 5, 4 * size).t()
                z = collectives.reduce_scatter(term(rank, 4 * size, 6)[:, ::2], group, schedule=schedule)
                assert_same_bytes(z, total(size, 4 * size, 6).chunk(size)[rank][:, ::2].contiguous(), f"{schedule} every second column")
                y = collectives.reduce_scatter(x, group, schedule=schedule)
                assert_same_bytes(y, total(size, 5, 4 * size).t().chunk(size)[rank].contiguous(), f"{schedule} transposed")

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nodes_of_uneven_runs(size, term, total):
    """Ranks with other numbers of experts, one with none: the leaves are summed as if one rank held them all."""
    leaves = 11
    runs = {1: [[11]], 2: [[5, 6], [0, 11], [10, 1]], 3: [[4, 0, 7], [8, 2, 1], [3, 4, 4]], 4: [[1, 5, 2, 3], [0, 3, 0, 8], [2, 3, 3, 3]]}[size]
    tree = ReductionTree(leaves)

    def rank_main(rank):
        group = dist.group.WORLD
        for run in runs:
            bounds = [sum(run[:i]) for i in range(size + 1)]
            spans = [tree.frontier(lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
            mine = tree.partial(bounds[rank], [term(leaf, 7, 4) for leaf in range(bounds[rank], bounds[rank + 1])])
            x = torch.stack([mine[node] for node in spans[rank]]) if mine else torch.empty(0, 7, 4)
            want = total(leaves, 7, 4)
            with poison():
                for schedule in ALL_REDUCE:
                    wide = torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]
                    y = collectives.all_reduce_nodes(wide, spans, tree, group, schedule=schedule)
                    assert_same_bytes(y, want, f"{schedule} {run} strided")
                    for dtype in (torch.float32, torch.bfloat16):
                        y = collectives.all_reduce_nodes(x, spans, tree, group, schedule=schedule, out_dtype=dtype)
                        assert_same_bytes(y, want.to(dtype), f"{schedule} {run}")
                for schedule in REDUCE_SCATTER:
                    counts = [7] if size == 1 else [1, *[0] * (size - 2), 6]
                    y = collectives.reduce_scatter_nodes(x, spans, tree, group, splits=counts, schedule=schedule)
                    assert_same_bytes(y, want.split(counts)[rank], f"{schedule} {run} scattered")

    run_ranks(size, rank_main)


def test_runs_that_do_not_ascend_with_the_rank(term, total):
    tree = ReductionTree(4)
    spans = [(Node(2, 2),), (Node(1, 1),), (Node(0, 1),)]

    def rank_main(rank):
        values = {Node(2, 2): term(2, 9) + term(3, 9), Node(1, 1): term(1, 9), Node(0, 1): term(0, 9)}
        x = torch.stack([values[node] for node in spans[rank]])
        for schedule in ALL_REDUCE:
            assert_same_bytes(collectives.all_reduce_nodes(x, spans, tree, dist.group.WORLD, schedule=schedule), total(4, 9), schedule)

    run_ranks(3, rank_main)


def test_subgroups(term, total):
    """Pairs, an uneven group and a group of one, at work at the same time; the group's rank is the leaf, not the world's."""

    def rank_main(rank):
        layouts = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2, 3], [1]]]
        for parts in layouts:
            groups = [dist.new_group(part) for part in parts]
            which = next(i for i, part in enumerate(parts) if rank in part)
            part, group = parts[which], groups[which]
            place = part.index(rank)
            for schedule in ALL_REDUCE:
                y = collectives.all_reduce(term(place, 33), group, schedule=schedule)
                assert_same_bytes(y, total(len(part), 33), f"{part} {schedule}")
            rows = torch.full((place, 2), rank)
            assert_same_bytes(
                collectives.all_gather(rows, group, sizes=range(len(part))), torch.tensor(part).repeat_interleave(torch.arange(len(part)))[:, None].repeat(1, 2)
            )
            outsider = groups[1 - which]
            try:
                collectives.all_reduce(term(0, 2), outsider)
            except ValueError as error:
                assert "not in the group" in str(error)
            else:
                raise AssertionError("a rank outside the group was accepted")

    run_ranks(4, rank_main)


def test_nan_infinity_and_negative_zero(term):
    def rank_main(rank):
        nan, inf = float("nan"), float("inf")
        rows = [[nan, 1.0, -0.0, inf, 1e38], [0.0, inf, -0.0, -inf, 3e38], [0.0, 1.0, -0.0, 0.0, 3e38], [0.0, 1.0, -0.0, 0.0, -3e38]]
        want = ReductionTree(4).reduce([torch.tensor(row) for row in rows])
        for schedule in ALL_REDUCE:
            y = collectives.all_reduce(torch.tensor(rows[rank]), dist.group.WORLD, schedule=schedule)
            assert_same_bytes(y, want, schedule)
            assert torch.signbit(y[2]), "a sum of -0 is -0: absent ranks add nothing"
        # NaN stays where it is: the other elements of its piece are untouched.
        assert want.isnan().tolist() == [True, False, False, True, False]

    run_ranks(4, rank_main)


def test_one_rank_alone_copies_nothing(term):
    x = term(0, 8, 2)
    tree = ReductionTree(4)
    for y in (
        collectives.all_reduce(x, None),
        collectives.reduce_scatter(x, None),
        collectives.all_gather(x, None),
        collectives.all_to_all(x, None, None, None),
        collectives.all_reduce_nodes(x[None], [tree.frontier(0, 4)], tree, None),
    ):
        assert y.data_ptr() == x.data_ptr()
        assert_same_bytes(y, x)
    assert_same_bytes(collectives.all_reduce(x, None, out_dtype=torch.bfloat16), x.bfloat16())
    out = torch.empty_like(x)
    assert collectives.all_reduce(x, None, out=out) is out
    assert_same_bytes(out, x)
    leaves = [term(i, 3) for i in range(4)]
    assert_same_bytes(collectives.all_reduce_nodes(torch.stack(leaves), [[Node(i, 1) for i in range(4)]], tree, None), tree.reduce(leaves))
