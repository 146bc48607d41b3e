"""The vocabulary's order: whatever an engine pads to and however it cuts, the same blocks meet in the same order."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tio_megatron.contract import Contract, Cuts, VocabOrder

ORDERS = st.builds(VocabOrder, vocab=st.integers(1, 20000), runs=st.sampled_from([1, 2, 4, 8, 16]))


def as_bytes(x: float) -> bytes:
    return struct.pack("<d", x)


def block_sum(order: VocabOrder, row: int) -> float:
    """A number per block that cancels badly; -0 for a block past the true vocabulary."""
    if row >= order.vocab:
        return -0.0
    return (1e20, 1.0, -1e20, 1.0, 3e-5)[row // order.block % 5]


def leaves_of(order: VocabOrder, lo: int, hi: int) -> list[float]:
    """One rank's leaves for the rows [lo, hi), absent ones filled."""
    values = [-0.0] * (order.leaf(hi) - order.leaf(lo))
    for row in range(lo, min(hi, order.padded), order.block):
        values[order.leaf(row) - order.leaf(lo)] = block_sum(order, row)
    return values


def total(order: VocabOrder, bounds: list[int]) -> float:
    parts = [order.tree.partial(order.leaf(lo), leaves_of(order, lo, hi)) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    for part, lo, hi in zip(parts, bounds, bounds[1:], strict=False):
        assert tuple(part) == order.frontier(lo, hi)
    return order.tree.combine(parts)


@given(ORDERS)
def test_shape(order):
    assert order.padded >= order.vocab and order.padded % (order.runs * order.block) == 0
    assert order.padded - order.vocab < order.runs * order.block
    leaves = [order.leaf(row) for row in range(0, order.padded, order.block)]
    assert leaves == sorted(set(leaves)) and leaves[-1] < order.tree.leaves
    assert all(order.leaf(run * order.run_rows) == run * order.stride for run in range(order.runs))
    assert order.leaf(order.padded) == order.leaf(order.padded + 5 * order.block) == order.tree.leaves


@given(ORDERS, st.data())
def test_any_cut_on_blocks_gives_the_same_bytes(order, data):
    padded = -(-order.vocab // order.block) * order.block + order.block * data.draw(st.integers(0, 40))
    cuts = data.draw(st.lists(st.integers(0, padded // order.block), max_size=6))
    bounds = [0, *sorted(c * order.block for c in cuts), max(padded, order.padded)]
    assert as_bytes(total(order, bounds)) == as_bytes(total(order, [0, order.padded]))


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 700, 5000, 151936])
def test_what_engines_pad_to_does_not_count(vocab):
    """Megatron pads to a multiple of 128 * tp, vLLM to 64: another padded size for each, the same order of the true rows."""
    order = VocabOrder(vocab)
    found = set()
    for tp in (1, 2, 4, 8):
        shard = -(-vocab // (128 * tp)) * 128
        bounds = [shard * rank for rank in range(tp)] + [max(shard * tp, order.padded)]
        found.add(as_bytes(total(order, bounds)))
    assert len(found) == 1


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_that_end_on_runs_send_one_node(tp):
    order = VocabOrder(151936, runs=8)
    shard = order.padded // tp
    assert [len(order.frontier(shard * r, shard * (r + 1))) for r in range(tp)] == [1] * tp


def test_the_number_of_runs_is_part_of_the_order():
    """Negative control: another contract is another order."""
    assert as_bytes(total(VocabOrder(5000, runs=8), [0, 5120])) != as_bytes(total(VocabOrder(5000, runs=1), [0, 5120]))
    assert Contract(cuts=Cuts(vocab=4)).vocab_order(5000) == VocabOrder(5000, 4, 128)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: VocabOrder(0), "must be positive"),
        (lambda: VocabOrder(100, runs=3), "power of two"),
        (lambda: VocabOrder(100, block=0), "must be positive"),
        (lambda: VocabOrder(1000).leaf(64), "row 64 is not the start of a block of 128 rows"),
        (lambda: VocabOrder(1000).leaf(-128), "not the start"),
        (lambda: VocabOrder(1000).frontier(0, 100), "row 100 is not the start"),
        (lambda: VocabOrder(1000).frontier(256, 128), "not inside"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
