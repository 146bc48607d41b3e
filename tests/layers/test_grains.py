"""Grains: every row in one grain of its sample, whoever holds it; every grain has one owner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tio_megatron.layers.grains import MicroBatch, cut, grain_of, label, splits
from tio_megatron.layers.sequences import Sequences


def members(grains, labels):
    """{grain: labels of its rows, in order}, for one weight."""
    rows = torch.arange(len(labels)) if grains.order is None else grains.order
    found = {}
    for lo, hi in zip(grains.starts[:-1].tolist(), grains.starts[1:].tolist(), strict=True):
        chosen = labels[rows[lo:hi]]
        (key,) = grain_of(chosen, 4).unique().tolist()
        assert key not in found, "one grain once"
        found[key] = chosen.tolist()
    return found


@given(st.lists(st.integers(0, 12), min_size=0, max_size=5), st.randoms())
def test_any_order_of_rows_gives_the_same_grains(sizes, random):
    labels = torch.cat([torch.empty(0, dtype=torch.int64)] + [label(torch.full((n,), i), torch.arange(n)) for i, n in enumerate(sizes)])
    order = list(range(len(labels)))
    random.shuffle(order)
    straight, mixed = members(cut(labels, 4), labels), members(cut(labels[order], 4), labels[order])
    assert straight == mixed
    assert sorted(row for rows in straight.values() for row in rows) == labels.tolist()


@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_shares_cover_every_grain_once(ranks, sizes):
    labels = torch.cat([label(torch.full((n,), i), torch.arange(n)) for i, n in enumerate(sizes)])
    whole = members(cut(labels, 4), labels)
    shared = {}
    for rank in range(ranks):
        mine = members(cut(labels, 4).shared(rank, ranks), labels)
        assert not shared.keys() & mine.keys()
        shared |= mine
    assert shared == whole


def test_grains_of_several_weights():
    labels = label(torch.tensor([0, 1, 0, 0, 1]), torch.tensor([0, 0, 5, 0, 1]))
    grains = cut(labels, 4, torch.tensor([0, 3, 3, 5]))
    assert grains.of.tolist() == [0, 3, 3, 5] and grains.starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert grains.order.tolist() == [0, 2, 1, 3, 4]


@pytest.mark.parametrize("length, grain, cut_up", [(32, 4, False), (32, 8, False), (32, 16, True), (24, 4, True), (24, 6, False)])
def test_context_parallelism_cuts_grains_where_chunks_miss_them(length, grain, cut_up):
    parts = []
    for rank in range(2):
        samples, positions = Sequences(rank=rank, ranks=2).rows(length // 2, 3)
        parts.append(label(samples, positions))
    assert splits(parts, grain) is cut_up


def test_labels_are_unique_over_replicas_and_cut_by_slices():
    first, second = (MicroBatch(Sequences(), 4, replica=replica) for replica in (0, 1))
    one, other = first.labels(6, 2), second.labels(6, 2)
    assert not set(one.tolist()) & set(other.tolist())
    assert torch.equal(torch.cat([first.labels(6, 2, 3, part) for part in range(3)]), one)
