"""Advantages, whitening and GAE: bytes that know nothing of sample order, ranks, packing or padding."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tio_megatron.rl import Moments, gae, group_advantages, token_moments, whiten
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

OPTIONS = [dict(), dict(divide_by_std=False), dict(divide_by_std=False, baseline="leave-one-out"), dict(baseline="leave-one-out")]


def rewards(n=24, groups=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator), torch.arange(n) % groups


@pytest.mark.parametrize("options", OPTIONS)
def test_order_of_samples(options):
    r, group = rewards()
    expected = group_advantages(r, group, **options)
    order = torch.randperm(len(r), generator=torch.Generator().manual_seed(1))
    assert_same_bytes(expected[order], group_advantages(r[order], group[order], **options))


def test_order_of_samples_matters_to_a_plain_mean():
    """Negative control: means by fp32 additions in the order of the batch."""
    r, _ = rewards(4096)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(1))

    def plain(x):
        return x - x.sum() / len(x)

    assert first_mismatch(plain(r)[order], plain(r[order]))
    zeros = torch.zeros(4096, dtype=torch.int64)
    assert_same_bytes(group_advantages(r, zeros)[order], group_advantages(r[order], zeros))


def test_ranks_hold_parts_of_the_groups():
    r, group = rewards(26)
    expected = group_advantages(r, group)

    def work(rank):
        mine = torch.arange(26) % 4 == rank
        moments = Moments.of(r[mine], group[mine], 3).over(dist.group.WORLD)
        return mine, group_advantages(r[mine], group[mine], moments=moments)

    for mine, got in run_ranks(4, work):
        assert_same_bytes(expected[mine], got)


@settings(max_examples=50)
@given(st.floats(-1e4, 1e4).map(lambda x: torch.tensor(x).item()), st.integers(2, 9))
def test_equal_rewards_teach_nothing(reward, n):
    for options in OPTIONS:
        assert not group_advantages(torch.full((n,), reward), torch.zeros(n, dtype=torch.int64), **options).any()


def test_a_group_of_one():
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]
    with pytest.raises(ValueError, match="group 1 has one"):
        group_advantages(torch.ones(3), torch.tensor([0, 0, 1]), baseline="leave-one-out")


def test_refusals():
    with pytest.raises(ValueError, match="'median' is unknown"):
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), baseline="median")
    with pytest.raises(ValueError, match="torch.float32"):
        group_advantages(torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="negative"):
        group_advantages(torch.ones(2), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match="moments are of 1 groups"):
        group_advantages(torch.ones(2), torch.tensor([0, 1]), moments=Moments.of(torch.ones(2)))


def test_whitening_by_parts():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) * 3 + 1
    sequence = torch.arange(4)[:, None].expand(4, 9).clone()
    sequence[1, 5:] = sequence[3, :2] = -1
    x[1, 6] = float("nan")
    expected = whiten(x, sequence)
    parts = [slice(2, 4), slice(0, 2)]
    moments = token_moments(x[parts[0]], sequence[parts[0]]) + token_moments(x[parts[1]], sequence[parts[1]])
    for part in parts:
        assert_same_bytes(expected[part], whiten(x[part], sequence[part], moments=moments))
    assert not expected[sequence < 0].any()
    assert first_mismatch(expected[parts[0]], whiten(x[parts[0]], sequence[parts[0]])), "moments of a part are others"
    assert first_mismatch(expected, whiten(x, sequence, shift=False))


def episodes():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, generator=generator) for n in (7, 1, 4)]


def alone(episode, gamma=0.95, lam=0.9):
    rewards, values = episode
    return gae(rewards, values, torch.zeros(len(rewards), dtype=torch.int64), gamma=gamma, lam=lam)


def test_gae_of_padded_rows_packs_and_rows_with_holes():
    """NaN where there is no token."""
    found = [alone(episode) for episode in episodes()]
    nan = float("nan")
    padded, owner = torch.full((2, 3, 9), nan), torch.full((3, 9), -1)
    packed, pack_owner = torch.full((2, 15), nan), torch.full((15,), -1)
    start = 1
    for i, episode in enumerate(episodes()):
        n = episode.shape[1]
        padded[:, i, 2 : 2 + n], owner[i, 2 : 2 + n] = episode, i
        packed[:, start : start + n], pack_owner[start : start + n] = episode, i
        start += n
    holes = torch.arange(7) * 2
    spaced, spaced_owner = torch.full((2, 14), nan), torch.full((14,), -1)
    spaced[:, holes], spaced_owner[holes] = episodes()[0], 0
    by_row = gae(*padded, owner, gamma=0.95, lam=0.9)
    by_pack = gae(*packed, pack_owner, gamma=0.95, lam=0.9)
    with_holes = gae(*spaced, spaced_owner, gamma=0.95, lam=0.9)
    for what in (0, 1):
        for i, expected in enumerate(found):
            assert_same_bytes(expected[what], by_row[what][owner == i])
            assert_same_bytes(expected[what], by_pack[what][pack_owner == i])
        assert_same_bytes(found[0][what], with_holes[what][holes])
        assert not by_row[what][owner < 0].any()
    wrong = gae(*packed[:, 1:13], torch.zeros(12, dtype=torch.int64), gamma=0.95, lam=0.9)
    assert first_mismatch(by_pack[0][1:13], wrong[0]), "control: one long sequence is another"


def test_gae_without_values_and_decay_is_the_sum_of_rewards_to_come():
    advantages, returns = gae(torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    assert advantages.tolist() == returns.tolist() == [7.0, 6.0, 4.0]
    with pytest.raises(ValueError, match="values must be"):
        gae(torch.ones(3), torch.ones(2), torch.zeros(3, dtype=torch.int64))
    assert gae(torch.ones(0), torch.ones(0), torch.zeros(0, dtype=torch.int64))[0].shape == (0,)
