"""One weight per token: micro-batches, ranks and sample order change no byte of any gradient, and the reported loss is one exact sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tio_megatron.rl import ExactSum, Summary, token_weights, weighted_sum
from tio_megatron.rl.aggregate import MODES
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

LENGTHS = [5, 1, 0, 7, 3, 6]


def batch():
    sequence = torch.full((6, 7), -1)
    for row, n in enumerate(LENGTHS):
        sequence[row, :n] = row
    losses = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)) * 3
    losses[sequence < 0] = float("nan")
    return losses, sequence, torch.tensor(LENGTHS)


def weights_of(sequence, mode):
    return token_weights(sequence, torch.tensor(LENGTHS), mode, horizon=7 if mode.endswith("norm") else None)


def test_modes():
    _, sequence, _ = batch()
    expected = {"token-mean": 1 / 22, "seq-mean-token-mean": 1 / (5 * 7), "seq-mean-token-sum": 1 / 5, "seq-mean-token-sum-norm": 1 / 35}
    for mode in MODES:
        w = weights_of(sequence, mode)
        assert_same_bytes(w[3, :7], torch.full((7,), expected[mode]))
        assert not w[sequence < 0].any()


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_order(mode):
    losses, sequence, _ = batch()

    def gradients(rows):
        given = losses[rows].clone().requires_grad_()
        weights = weights_of(sequence[rows], mode)
        weighted_sum(given, weights).backward()
        return given.grad, ExactSum.of(losses[rows] * weights, sequence[rows].clamp(max=0))

    whole, total = gradients(list(range(6)))
    parts = [[5, 0], [3], [2, 4, 1]]
    sums = []
    for rows in parts:
        got, part = gradients(rows)
        assert_same_bytes(whole[rows], got)
        sums.append(part)
    assert_same_bytes(total.values(), (sums[2] + sums[0] + sums[1]).values())


def test_a_mean_of_means_depends_on_the_micro_batch():
    """Negative control: the customary chain, a mean over each micro-batch and then over micro-batches."""
    losses, sequence, _ = batch()
    losses = losses.nan_to_num(0.0)

    def chain(parts):
        given = losses.clone().requires_grad_()
        for rows in parts:
            there = (sequence[rows] >= 0).float()
            ((given[rows] * there).sum() / there.sum() / len(parts)).backward()
        return given.grad

    assert first_mismatch(chain([[0, 1, 2], [3, 4, 5]]), chain([[0, 3, 2], [1, 4, 5]]))


def test_nan_without_weight_stays_there():
    losses, sequence, _ = batch()
    given = losses.clone().requires_grad_()
    loss = weighted_sum(given, weights_of(sequence, "token-mean"))
    loss.backward()
    assert loss.isfinite() and given.grad.isfinite().all()


def test_refusals():
    sequence, lengths = torch.tensor([0, 1]), torch.tensor([1, 1])
    rows = [
        (dict(mode="mean"), "'mean' is unknown"),
        (dict(mode="token-mean", horizon=5), "with horizon 5"),
        (dict(mode="seq-mean-token-sum-norm"), "with horizon None"),
        (dict(lengths=torch.tensor([0, 0])), "at least one positive"),
        (dict(lengths=torch.tensor([1, 0])), "says 0"),
        (dict(lengths=torch.tensor([1])), "lengths has 1 sequences"),
    ]
    for wrong, message in rows:
        with pytest.raises(ValueError, match=message):
            token_weights(**(dict(sequence=sequence, lengths=lengths) | wrong))
    with pytest.raises(ValueError, match="one shape"):
        weighted_sum(torch.ones(2), torch.ones(3))


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), st.integers(0, 30))
def test_summaries_join(x, cut):
    whole, joined = Summary.of(torch.tensor(x)), Summary.of(torch.tensor(x[cut:])) + Summary.of(torch.tensor(x[:cut]))
    for name in ("count", "mean", "nonzero", "smallest", "largest"):
        assert getattr(whole, name) == getattr(joined, name), name


def test_summaries_over_ranks():
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    x[1, 2] = 0.0
    sequence = torch.zeros(4, 6, dtype=torch.int64)
    sequence[:, 5] = -1

    def work(rank):
        import torch.distributed as dist

        found = Summary.of(x[rank : rank + 1] if rank else torch.empty(0, 6), sequence[rank : rank + 1] if rank else torch.empty(0, 6, dtype=torch.int64))
        return [(s.count, s.mean, s.nonzero, s.smallest, s.largest) for s in (found.over(dist.group.WORLD),)][0]

    expected = Summary.of(x[1:], sequence[1:])
    for got in run_ranks(4, work):
        assert got == (expected.count, expected.mean, expected.nonzero, expected.smallest, expected.largest)
    assert expected.count == 15 and expected.nonzero == 14
