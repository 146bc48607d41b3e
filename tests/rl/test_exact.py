"""Exact sums: any order and any split give the same bytes, and they are those of the true sum rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tio_megatron.rl import ExactSum, Moments
from tio_megatron.rl.exact import rounded
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=30)
doubles = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20)


@settings(max_examples=60)
@given(numbers, st.randoms())
def test_any_order_and_any_split(x, random):
    whole = ExactSum.of(torch.tensor(x))
    shuffled = x[:]
    random.shuffle(shuffled)
    cut = random.randint(0, len(x))
    parts = ExactSum.of(torch.tensor(shuffled[:cut])) + ExactSum.of(torch.tensor(shuffled[cut:]))
    assert_same_bytes(whole.values(), parts.values())
    assert parts.exact() == whole.exact() == [sum(map(Fraction, x), Fraction())]


@settings(max_examples=60)
@given(doubles)
def test_doubles_are_exact_too(x):
    assert ExactSum.of(torch.tensor(x, dtype=torch.float64)).exact() == [sum(map(Fraction, x), Fraction())]


@settings(max_examples=200)
@given(st.floats(-(2.0**80), 2.0**80, width=32), st.integers(-(2**40), 2**40), st.integers(0, 60))
def test_rounding_once(x, offset, scale):
    """The nearest fp32 number: neither neighbour is nearer, and one as near is odd."""
    exact = Fraction(x) + Fraction(offset, 2**scale) * Fraction(abs(x) or 1.0)
    got = rounded([exact])
    error = abs(Fraction(got.item()) - exact)
    for towards in (math.inf, -math.inf):
        other = torch.nextafter(got, torch.tensor([towards]))
        away = abs(Fraction(other.item()) - exact)
        assert error < away or (error == away and int(other.view(torch.int32)) & 1)


def test_a_tie_that_two_roundings_get_wrong():
    one_and_half_unit = Fraction(1) + Fraction(1, 2**24) + Fraction(1, 2**80)
    assert rounded([one_and_half_unit]).item() == 1 + 2.0**-23
    assert torch.tensor([float(one_and_half_unit)], dtype=torch.float64).float().item() == 1.0


def test_plain_sums_depend_on_the_order():
    """Negative control: on the same numbers torch's own sums differ, in fp32 and in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.randn(4096, generator=generator).mul(20).exp()
    y = x[torch.randperm(4096, generator=generator)]
    assert first_mismatch(x.sum(), y.sum())
    assert first_mismatch(x.double().sum(), y.double().sum())
    assert_same_bytes(ExactSum.of(x).values(), ExactSum.of(y).values())


def test_sums_side_by_side_and_places_left_out():
    x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 8.0, 16.0]])
    index = torch.tensor([[2, 0, -1], [0, 2, 2]])
    sums = ExactSum.of(x, index, 4)
    assert_same_bytes(sums.values(), torch.tensor([6.0, 0.0, 25.0, 0.0]))
    assert sums.counts().tolist() == [2, 0, 3, 0]
    assert_same_bytes(sums.means(), torch.tensor([3.0, float("nan"), 25.0 / 3, float("nan")]))


def test_what_is_not_finite():
    inf, nan = math.inf, math.nan
    rows = [([inf, 1.0], inf), ([-inf, 1.0], -inf), ([inf, -inf], nan), ([nan, 1.0], nan), ([-0.0, -0.0], 0.0), ([1e38, 3e38], inf), ([5e-324, -5e-324], 0.0)]
    for terms, expected in rows:
        assert_same_bytes(ExactSum.of(torch.tensor(terms, dtype=torch.float64)).values(), torch.tensor([expected]))


def test_moments_are_rounded_once():
    x = torch.tensor([1e8, 1e8 + 8, 1e8 + 16])
    moments = Moments.of(x)
    assert_same_bytes(moments.variances(), torch.tensor([64.0]))
    assert_same_bytes(moments.variances(unbiased=False), torch.tensor([float(Fraction(128, 3))]))
    assert_same_bytes(moments.deviations(), torch.tensor([8.0]))
    assert Moments.of(torch.tensor([3.0])).variances().tolist() == [0.0]


def test_ranks():
    x = torch.randn(37, generator=torch.Generator().manual_seed(1)) * 1e4
    index = torch.arange(37) % 3

    def work(rank):
        mine = torch.arange(37) % 4 == rank
        moments = Moments.of(x[mine], index[mine], 3).over(dist.group.WORLD)
        return moments.sums.values(), moments.means(), moments.variances()

    alone = Moments.of(x, index, 3)
    for got in run_ranks(4, work):
        assert_same_bytes(got, (alone.sums.values(), alone.means(), alone.variances()))


def test_refusals():
    with pytest.raises(ValueError, match="between -1 and 1"):
        ExactSum.of(torch.ones(2), torch.tensor([0, 2]), 2)
    with pytest.raises(ValueError, match="floating point only"):
        ExactSum.of(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="torch.float32"):
        Moments.of(torch.ones(2, dtype=torch.float64))
