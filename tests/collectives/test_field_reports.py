"""Faults reported from the field that are made by sums between ranks; each with the fault itself as negative control."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.contract import ReductionTree
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks


def bounds(total: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(total * i // parts for i in range(parts + 1)))


def vendor_reduce_scatter(terms: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a ring does: the piece of rank r starts at rank r + 1 and is added on the way."""
    size = len(terms)
    pieces = []
    for owner in range(size):
        chunks = [term.chunk(size)[owner] for term in terms]
        acc = chunks[(owner + 1) % size]
        for step in range(2, size + 1):
            acc = acc + chunks[(owner + step) % size]
        pieces.append(acc)
    return pieces


def test_another_tensor_parallel_size_same_bytes():
    """Partial sums rounded per rank and added by the vendor: 1, 2, 4 and 8 ranks give other answers. Ours give one."""
    leaves, shape = 8, (16, 12)
    tree = ReductionTree(leaves)

    def rank_main(rank, size):
        lo, hi = bounds(leaves, size)[rank]
        mine = [torch.randn(shape, generator=torch.Generator().manual_seed(leaf)) for leaf in range(lo, hi)]
        (node,) = tree.frontier(lo, hi)
        partial = tree.partial(lo, mine)[node]
        ours = collectives.all_reduce(partial, dist.group.WORLD, out_dtype=torch.bfloat16)
        stock = sum(mine[1:], mine[0]).bfloat16()
        dist.all_reduce(stock)
        return ours, stock

    found = {size: run_ranks(size, rank_main, size) for size in (1, 2, 4, 8)}
    for size, ranks in found.items():
        for ours, _ in ranks:
            assert_same_bytes(ours, found[1][0][0], f"TP {size}")
    assert all(first_mismatch(found[size][0][1], found[1][0][1]) for size in (2, 4, 8)), "stock must differ, or this proves nothing"


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_owner_of_the_token_does_not_matter(term, total, shift):
    """Experts on four ranks, a token owned by any of them: expert owner pre-reduces (reduce-scatter) or token owner adds what it was sent."""
    size, tokens = 4, 8

    def rank_main(rank):
        group = dist.group.WORLD
        order = torch.arange(tokens).roll(shift)  # which rows a rank owns moves with the shift
        x = term(rank, tokens, 5)[order]
        reduced = collectives.reduce_scatter(x, group)
        rows = collectives.all_to_all(x, None, None, group).view(size, tokens // size, 5)
        added = ReductionTree(size).reduce(list(rows))
        assert_same_bytes(reduced, added, "the expert's owner against the token's owner")
        whole = torch.empty(tokens, 5)
        whole[order] = collectives.all_gather(reduced, group)
        return whole

    for whole in run_ranks(size, rank_main):
        assert_same_bytes(whole, total(size, tokens, 5), f"owners shifted by {shift}")
    if shift:
        order = torch.arange(tokens).roll(shift)
        vendor = torch.empty(tokens, 5)
        vendor[order] = torch.cat(vendor_reduce_scatter([term(rank, tokens, 5)[order] for rank in range(size)]))
        straight = torch.cat(vendor_reduce_scatter([term(rank, tokens, 5) for rank in range(size)]))
        assert first_mismatch(vendor, straight), "a ring that starts at the owner must differ, or this proves nothing"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequence_parallel_on_and_off(term, total, size):
    """Reduce-scatter then all-gather against all-reduce."""
    rows = 12

    def rank_main(rank):
        x, group = term(rank, rows, 7), dist.group.WORLD
        for schedule in ("scatter", "ring"):
            on = collectives.all_gather(collectives.reduce_scatter(x, group, schedule=schedule, out_dtype=torch.bfloat16), group)
            for other in ("doubling", "scatter", "ring"):
                assert_same_bytes(on, collectives.all_reduce(x, group, schedule=other, out_dtype=torch.bfloat16), f"{schedule} {other}")
        return x

    terms = run_ranks(size, rank_main)
    if size > 2:  # two terms commute
        assert first_mismatch(torch.cat(vendor_reduce_scatter(terms)), total(size, rows, 7)), "the vendor's order must differ, or this proves nothing"


def test_message_size_and_earlier_traffic(monkeypatch, term, total):
    """An element's sum does not depend on the tensor it is in, on the side of the switch, or on what was sent before."""
    monkeypatch.setenv("TIO_COLLECTIVE_SWITCH_BYTES", "4096")
    sizes = [1, 2, 5, 255, 1023, 1024, 1025, 1500, 4096, 20000]

    def rank_main(rank):
        group = dist.group.WORLD
        stock = {}
        for count in [*sizes, *reversed(sizes)]:
            assert_same_bytes(collectives.all_reduce(term(rank, count), group), total(4, 20000)[:count], f"{count} elements")
            collectives.all_gather(torch.ones(rank, 3), group, sizes=range(4))
            stock[count] = term(rank, count)
            dist.all_reduce(stock[count])
        return stock

    stock = run_ranks(4, rank_main)[0]
    assert any(first_mismatch(stock[count], stock[20000][:count]) for count in sizes), "gloo must differ, or this proves nothing"
