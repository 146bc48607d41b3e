"""Draws: known values, exact probabilities, no place twice, nothing that depends on a library's random stream."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_batches import batch

from tio_megatron.rollouts import Store, StoreError, draw
from tio_megatron.rollouts.draw import _Tree, _whole

KNOWN = [5, 8, 3, 0, 5, 5, 7, 3]


def test_the_same_places_on_every_machine():
    """Written down once; whoever changes the draw changes what every stored run means."""
    assert draw(np.ones(10), 8, seed=5).places.tolist() == KNOWN
    assert draw(np.full(10, 0.25), 8, seed=5).places.tolist() != draw(np.ones(10), 8, seed=6).places.tolist()
    assert draw(np.ones(10), 8, seed=5).places.tolist() == draw(np.full(10, 2.0**-700), 8, seed=5).places.tolist()


def test_places_follow_the_weights():
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    found = Counter(draw(weights, 8000, seed=1).places.tolist())
    assert found[1] == 0 and all(abs(found[i] / 8000 - weights[i] / 8) < 0.02 for i in range(4))
    uniform = Counter(draw(np.ones(4), 8000, seed=1).places.tolist())
    assert all(abs(uniform[i] / 8000 - 0.25) < 0.02 for i in range(4))


def test_probabilities_are_exact_and_rounded_once():
    weights = np.array([1e300, 1e-300, 1e300])
    found = draw(weights, 3, seed=2)
    assert found.probabilities.tolist() == [float(Fraction(weights[i]) / sum(map(Fraction, weights))) for i in found.places]
    assert {float(p) for p in draw(np.ones(3), 9, seed=2).probabilities} == {1 / 3}


def test_without_replacement_every_place_once():
    drawn = draw(np.arange(1.0, 51.0), 50, seed=3, replace=False).places
    assert sorted(drawn.tolist()) == list(range(50)) and drawn.tolist() != list(range(50))
    with pytest.raises(StoreError, match="3 asked for without replacement, 2 places"):
        draw([1.0, 0.0, 1.0], 3, seed=3, replace=False)


@settings(max_examples=100)
@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any), seed=st.integers(-(2**70), 2**70))
def test_the_tree_finds_what_a_walk_finds(weights, seed):
    """The reference in one line, for with and without replacement."""
    whole = _whole(np.array(weights))
    tree, left = _Tree(whole), list(whole)
    for below in {0, sum(whole) - 1, sum(whole) // 2, sum(whole) // 3}:
        assert tree.find(below) == next(i for i in range(len(left)) if sum(left[: i + 1]) > below)
    there = int(np.count_nonzero(weights))
    assert sorted(draw(weights, there, seed, replace=False).places.tolist()) == [i for i, weight in enumerate(weights) if weight]


@pytest.mark.parametrize("weights", [[-1.0], [float("nan")], [float("inf")], [[1.0]], [0.0], []], ids=str)
def test_weights_that_are_none(weights):
    with pytest.raises(StoreError, match="draw"):
        draw(weights, 1, seed=0)


@pytest.mark.parametrize("count,seed", [(0, 1), (-1, 1), (1.5, 1), (1, 0.5), (True, 1)])
def test_counts_and_seeds_that_are_none(count, seed):
    with pytest.raises(StoreError, match="whole number"):
        draw([1.0], count, seed)


def test_of_a_store(tmp_path):
    store = Store.create(tmp_path / "store")
    for seed in range(3):
        store.append(batch(seed, sequences=4))
    assert store.sample(6, 1).places.tolist() == draw(np.ones(12), 6, 1).places.tolist()
    assert min(store.sample(200, 1, newest=1).places) == 8 and min(store.sample(200, 1, newest=5).places) == 0
    weights = np.concatenate([held.rewards for held in store])
    assert store.sample(6, 1, weights=weights).places.tolist() != store.sample(6, 1).places.tolist()
    with pytest.raises(StoreError, match=r"weights of the shape \[3\] for 12"):
        store.sample(1, 1, weights=[1.0, 1.0, 1.0])
    with pytest.raises(StoreError, match="newest must be 1 or more"):
        store.sample(1, 1, newest=0)
