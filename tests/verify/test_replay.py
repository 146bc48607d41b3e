"""Replay: stored log-probabilities against those that are scored now. The engines themselves are in tests/job/test_kept_rollouts.py."""

import numpy as np
import pytest
from rollout_batches import ABOUT, batch

from tio_megatron.rollouts import StoreError
from tio_megatron.verify.replay import Replayed, replay


def test_equal_bytes():
    batches = [batch(seed) for seed in range(3)]
    found = replay(batches, lambda held: held.responses, weights=ABOUT.weights)
    assert found == Replayed(3, sum(len(held.logprobs) for held in batches), 0, 0.0) and found.same


def test_one_other_bit_is_found():
    held = batch(1)
    changed = [row.copy() for row in held.responses]
    place = next(i for i, row in enumerate(changed) if len(row))
    changed[place][-1] = np.nextafter(changed[place][-1], np.float32(-9))
    found = replay([held], lambda _: changed)
    assert not found.same and found.differ == 1 and 0 < found.max_abs < 1e-6
    assert found.first.startswith(f"batch 0, sequence {place}, response token {len(changed[place]) - 1}: stored ")


def test_what_cannot_be_compared():
    with pytest.raises(StoreError, match="was sampled by weights, these weights are others"):
        replay([batch()], lambda held: held.responses, weights="others")
    with pytest.raises(StoreError, match="holds no log-probabilities"):
        replay([batch(scored=False)], lambda held: held.responses)
    with pytest.raises(StoreError, match="5 sequences, 4 were scored"):
        replay([batch()], lambda held: held.responses[:4])
    with pytest.raises(StoreError, match="log-probabilities are stored"):
        replay([batch()], lambda held: [np.append(row, np.float32(-1)) for row in held.responses])
    assert not replay([], lambda held: held.responses).same, "nothing compared is not equal"
