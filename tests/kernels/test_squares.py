"""The exact sum of squares: the reference's value, in any order and cut, and the product that clips."""

from __future__ import annotations

import math

import pytest
import torch

from tio_megatron.kernels import squares
from tio_megatron.kernels.squares import reference
from tio_megatron.testing import assert_same_bytes

LIMIT = torch.finfo(torch.float32)


def total_of(*parts: torch.Tensor) -> torch.Tensor:
    total = squares.empty_sum()
    for part in parts:
        squares.add_squares_(total, part)
    return total


def wide(n: int) -> torch.Tensor:
    """Normal numbers whose exponents span the whole type, signed, with zeros and subnormals."""
    x = torch.randn(n) * torch.exp2(torch.randint(-149, 120, (n,)).double()).float()
    x[::7] = torch.tensor([0.0, -0.0, 1e-45, -1e-40, LIMIT.tiny]).repeat(n)[: len(x[::7])]
    return x


@pytest.mark.parametrize("n", [0, 1, 3, 1000, 70_000])
def test_value_is_the_references(n: int) -> None:
    for x in (torch.randn(n), wide(n), torch.full((n,), LIMIT.max), torch.full((n,), 2.0**-149)):
        assert_same_bytes(squares.value(total_of(x)), reference.value(x))


def test_limbs_are_canonical_and_free_of_order() -> None:
    x = wide(100_000)
    whole = total_of(x)
    assert all(0 <= limb < 2**32 for limb in whole[: squares.LIMBS - 1].tolist())
    assert_same_bytes(total_of(*x[torch.randperm(len(x))].split(777)), whole)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same_bytes(total_of(x), whole)
    finally:
        torch.set_num_threads(before)
    # Negative control: a sum of floats does depend on the order.
    plain = torch.randn(100_000)
    assert sum((plain**2).tolist()) != sum((plain.flip(0) ** 2).tolist())


def test_sums_of_ranks_are_added_limb_by_limb() -> None:
    parts = [wide(5000) for _ in range(4)]
    added = sum((total_of(part) for part in parts), squares.empty_sum())
    assert_same_bytes(squares.value(added), reference.value(torch.cat(parts)))
    assert_same_bytes(squares.root(added), math.sqrt(reference.value(torch.cat(parts))))


def test_a_small_term_among_large_ones_counts() -> None:
    x = torch.tensor([2.0**30, 2.0**-22])
    assert squares.value(total_of(x)) == 2.0**60
    assert squares.value(total_of(x, x[1:], torch.tensor([2.0**-22] * 2), torch.tensor([2.0**4]))) == 2.0**60 + 2.0**8
    assert total_of(x)[:18].count_nonzero() == 2


def test_what_is_not_finite_is_reported() -> None:
    x = torch.ones(40_000)
    x[12_345] = float("-inf")
    assert squares.value(total_of(x)) == math.inf
    assert total_of(x)[squares.LIMBS :].tolist() == [1, 0]
    x[39_999] = float("nan")
    assert math.isnan(squares.value(total_of(x))) and math.isnan(squares.root(total_of(x)))
    assert math.isnan(reference.value(x))


def test_views_and_shapes() -> None:
    x = torch.randn(40, 30)
    assert_same_bytes(total_of(x.t()[::2]), total_of(x[:, ::2].contiguous()))
    assert_same_bytes(total_of(torch.tensor(3.0))[:10].sum(), total_of(torch.tensor([3.0]))[:10].sum())


def test_scale_is_one_product(isa: str) -> None:
    x = torch.cat([wide(999), torch.tensor([float("inf"), float("nan")])])
    wanted = reference.scale(x, 1 / 3)
    squares.scale_(x, 1 / 3)
    assert_same_bytes(x, wanted)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="x is torch.bfloat16"):
        squares.add_squares_(squares.empty_sum(), torch.ones(2).bfloat16())
    with pytest.raises(ValueError, match=r"total has shape \[3\]"):
        squares.add_squares_(torch.zeros(3, dtype=torch.int64), torch.ones(2))
    with pytest.raises(ValueError, match="not contiguous"):
        squares.scale_(torch.ones(4, 4).t()[1:], 0.5)
