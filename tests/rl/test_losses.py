"""Ratios, importance weights, KL and the clipped losses: exact where the two policies agree, the same in any packing."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tio_megatron.rl import (
    clipped_loss,
    importance_weights,
    kl,
    masked,
    sequence_ratio,
    sequence_sums,
    spread,
    token_ratio,
    truncated,
    weighted_sum,
)
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

LEVELS = ("token", "sequence", "geometric")
logs = st.floats(-30, 0).map(lambda x: torch.tensor(x).item())


def tokens(seed=0):
    """Two log-probabilities of 5 sequences in padded rows, NaN where there is no token."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.arange(5)[:, None].expand(5, 40).clone()
    for row, n in enumerate((40, 3, 17, 1, 29)):
        sequence[row, n:] = -1
    new = -torch.rand(5, 40, generator=generator) * 4
    old = new + torch.randn(5, 40, generator=generator) * 0.3
    new[sequence < 0] = old[sequence < 0] = float("nan")
    return new, old, sequence


@settings(max_examples=50)
@given(st.lists(logs, min_size=1, max_size=20))
def test_policies_that_agree(x):
    x = torch.tensor(x)
    own = torch.zeros(len(x), dtype=torch.int64)
    one, zero = torch.ones(len(x)), torch.zeros(len(x))
    assert_same_bytes(token_ratio(x, x), one)
    assert_same_bytes(sequence_ratio(x, x, own, 1), one)
    for level in LEVELS:
        weights = importance_weights(x, x, own, 1, level=level)
        assert_same_bytes((weights, truncated(weights, 2.0), masked(weights, 0.5, 2.0)), (one, one, one))
    for estimator in ("k1", "k2", "k3"):
        assert_same_bytes(kl(x, x, estimator), zero)
    assert_same_bytes(clipped_loss(token_ratio(x, x), torch.arange(len(x)) - 3.0, dual=3.0).loss, -(torch.arange(len(x)) - 3.0))


def every(new, old, sequence, group=None):
    """All numbers per token of this file, gradients included; 0 where there is no token."""
    given = new.clone().requires_grad_()
    ratios = token_ratio(given, old), sequence_ratio(given, old, sequence, 5, group=group)
    weights = [importance_weights(new, old, sequence, 5, level=level, group=group) for level in LEVELS]
    advantages = spread(torch.tensor([1.0, -0.7, 0.3, -2.0, 0.1]), sequence)
    losses = [clipped_loss(ratio, advantages, clip=0.1, clip_high=0.2, dual=1.5).loss for ratio in ratios]
    total = sum(weighted_sum(loss, weight) for loss, weight in zip(losses, weights, strict=False))
    total = total + weighted_sum(kl(given, old), (sequence >= 0).float())
    total.backward()
    found = [x.detach() for x in (*ratios, *losses)] + weights + [kl(new, old, e) for e in ("k1", "k2", "k3")]
    return torch.stack([x.where(sequence >= 0, 0.0) for x in found] + [given.grad])


def test_packing_order_and_context_parallelism():
    new, old, sequence = tokens()
    expected = every(new, old, sequence)
    assert expected.isfinite().all()
    flat = sequence.reshape(-1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    order = order[flat[order] >= 0]
    packed = every(new.reshape(-1)[order], old.reshape(-1)[order], flat[order])
    assert_same_bytes(expected.reshape(-1, 200)[:, order], packed)

    def work(rank):
        mine = order[order % 4 == rank]
        return mine, every(new.reshape(-1)[mine], old.reshape(-1)[mine], flat[mine], dist.group.WORLD)

    for mine, got in run_ranks(4, work):
        assert_same_bytes(expected.reshape(-1, 200)[:, mine], got)


def test_plain_sums_over_a_sequence_depend_on_its_order():
    """Negative control."""
    generator = torch.Generator().manual_seed(1)
    x, order = torch.randn(4096, generator=generator), torch.randperm(4096, generator=generator)
    assert first_mismatch(x.sum(), x[order].sum())
    zeros = torch.zeros(4096, dtype=torch.int64)
    assert_same_bytes(sequence_sums(x, zeros, 1), sequence_sums(x[order], zeros, 1))


def test_clips():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5, 0.5, 1.5, 9.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    found = clipped_loss(ratio, advantages, clip=0.25, clip_high=0.25, dual=3.0)
    assert_same_bytes(found.loss.detach(), torch.tensor([-0.5, -0.9, -1.0, -1.1, -1.25, 0.75, 1.5, 3.0]))
    assert found.clipped.tolist() == [False] * 4 + [True, True, False, False]
    assert found.capped.tolist() == [False] * 7 + [True]
    found.loss.sum().backward()
    assert_same_bytes(ratio.grad, torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 1.0, 0.0]))
    assert clipped_loss(torch.tensor([float("nan")]), torch.ones(1)).loss.isnan().all()
    for wrong in (dict(clip=1.5), dict(clip_high=-0.1), dict(dual=1.0)):
        with pytest.raises(ValueError, match="clipped_loss: needs"):
            clipped_loss(ratio, advantages, **wrong)


def test_weights_that_are_cut_off_or_dropped():
    w = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0, float("inf")])
    assert truncated(w, 2.0).tolist() == [w[0].item(), 0.5, 1.0, 2.0, 2.0, 2.0]
    assert masked(w, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]
    assert truncated(torch.tensor([float("nan")]), 2.0).isnan().all()
    with pytest.raises(ValueError, match="'word' is unknown"):
        importance_weights(w, w, torch.zeros(6, dtype=torch.int64), 1, level="word")


def test_a_sequence_ratio_sends_each_token_its_own_gradient():
    new, old, sequence = tokens()
    given = new.clone().requires_grad_()
    ratio = sequence_ratio(given, old, sequence, 5)
    ratio.where(sequence >= 0, 0.0).sum().backward()
    assert_same_bytes(given.grad.where(sequence >= 0, 0.0), ratio.detach().where(sequence >= 0, 0.0))
    assert not given.grad[sequence < 0].any()


@settings(max_examples=100)
@given(logs, logs)
def test_k3_is_never_negative(a, b):
    assert kl(torch.tensor([a]), torch.tensor([b])).item() >= 0


def test_kl_bounds_and_refusal():
    a, b = torch.zeros(3), torch.tensor([-30.0, 5.0, 0.1])
    assert_same_bytes(kl(a, b, "k1", log_bound=20.0), torch.tensor([20.0, -5.0, -0.1]))
    assert_same_bytes(kl(a, b, "k3", bound=10.0, log_bound=20.0)[:2], torch.tensor([10.0, 10.0]))
    with pytest.raises(ValueError, match="'k4' is unknown"):
        kl(a, b, "k4")
