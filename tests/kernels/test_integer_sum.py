"""Exact sums of partials: each rounded once, added in any order, read back with one rounding. Products over grains: test_integer_products.py."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from tio_megatron.kernels.integer_sum import IntegerSum, add_norm_terms, add_rows, reference, split_for, untouched_zeros, value
from tio_megatron.testing import assert_same_bytes, first_mismatch

UNIT, SPLIT = -20, 30
LARGE, LIMIT = 2.0 ** (UNIT + SPLIT), 2.0 ** (UNIT + 2 * SPLIT - 24)
# zeros, ties to even on both sides, just beside ties, subnormals, around the split and around the limit
EDGES = [0.0, -0.0, *(s * k * 2.0 ** (UNIT - 1) for s in (1, -1) for k in (0.5, 1, 2, 3, 5, 7)), (1 + 2.0**-23) * 2.0 ** (UNIT - 1), 2.0**-149, -(2.0**-130)]
EDGES += [s * m for s in (1, -1) for m in (LARGE, LARGE * (1 - 2.0**-24), LARGE * 3, LIMIT * (1 - 2.0**-24))]
BEYOND = [LIMIT, -LIMIT, 3e38, math.inf, -math.inf, math.nan]


def parts(total: IntegerSum) -> tuple[torch.Tensor, ...]:
    return total.low, total.high, total.peak


def exact(partials: list[float], unit: int, split: int) -> tuple[int, int]:
    """(low, high) of one element by fractions: Python's own `round` is half to even."""
    low = sum(round(Fraction(p) / Fraction(2) ** unit) for p in partials if abs(p) < 2.0 ** (unit + split))
    high = [Fraction(p) / Fraction(2) ** (unit + split - 24) for p in partials if 2.0 ** (unit + split) <= abs(p) < 2.0 ** (unit + 2 * split - 24)]
    assert all(h.denominator == 1 for h in high), "large partials are whole numbers of the second unit"
    return low, int(sum(high))


class TestDefinition:
    def test_one_element_by_fractions(self) -> None:
        total = IntegerSum.empty((1,), UNIT, SPLIT)
        for p in EDGES + BEYOND:
            reference.add_partials(total, torch.tensor([p]))
        finite = [p for p in EDGES + BEYOND if math.isfinite(p)]
        assert (total.low.item(), total.high.item()) == exact(finite, UNIT, SPLIT)
        assert total.peak.item() == math.inf

    @pytest.mark.parametrize("unit", (-189, -150, -50, 0, 88))
    def test_value_by_fractions(self, unit: int) -> None:
        generator = torch.Generator().manual_seed(unit + 200)
        low = torch.randint(-(2**62), 2**62, (200,), generator=generator) >> torch.randint(0, 62, (200,), generator=generator)
        high = torch.randint(-(2**50), 2**50, (200,), generator=generator) >> torch.randint(0, 50, (200,), generator=generator)
        got = reference.value(low, high, unit, 40)
        for n, h, y in zip(low.tolist(), high.tolist(), got.tolist(), strict=True):
            want = (h * 2**16 + n) * Fraction(2) ** unit
            if math.isinf(y):
                assert abs(want) >= (2 - Fraction(2) ** -24) * 2**127
                continue
            here = torch.tensor([y])
            beside = [torch.nextafter(here, torch.full((1,), way)).item() for way in (-math.inf, math.inf)]
            error = abs(want - Fraction(y))
            for other in (Fraction(b) for b in beside if math.isfinite(b)):
                assert error < abs(want - other) or (error == abs(want - other) and here.view(torch.int32).item() % 2 == 0)

    def test_split(self) -> None:
        for partials in (1, 2, 4096, 4097, 1 << 25, 1 << 38):
            assert partials * 2 ** split_for(partials) <= 1 << 62
        for wrong in (0, (1 << 38) + 1):
            with pytest.raises(ValueError, match="cannot be summed exactly"):
                split_for(wrong)


class TestRows:
    def test_bytes_are_the_references(self, isa: str, dtype: torch.dtype) -> None:
        rows, ids = (torch.randn(40, 37) * torch.exp2(torch.randint(-30, 20, (40, 37)).float())).to(dtype), torch.randint(0, 9, (40,))
        got, want = IntegerSum.empty((9, 37), UNIT, SPLIT), IntegerSum.empty((9, 37), UNIT, SPLIT)
        add_rows(got, rows, ids)
        reference.add_rows(want, rows, ids)
        assert_same_bytes(parts(got), parts(want))
        assert got.high.any() and got.peak.item() == rows.float().abs().max().item()

    @pytest.mark.parametrize("n", (1, 7, 16, 40))
    def test_edges(self, isa: str, n: int) -> None:
        for special in EDGES + BEYOND:
            rows = torch.full((2, n), 2.0 ** (UNIT + 3))
            rows[1, n // 2] = special
            got, want = IntegerSum.empty((2, n), UNIT, SPLIT), IntegerSum.empty((2, n), UNIT, SPLIT)
            add_rows(got, rows, torch.tensor([1, 1]))
            reference.add_rows(want, rows, torch.tensor([1, 1]))
            assert_same_bytes(parts(got), parts(want), f"{special}")

    @pytest.mark.parametrize("unit", (-256, -189, -149, -126, -50, 88, 104, 256))
    def test_units(self, isa: str, unit: int) -> None:
        rows = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x3F800001, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32).repeat(4).unsqueeze(0)
        got, want = IntegerSum.empty((1, 24), unit, 50), IntegerSum.empty((1, 24), unit, 50)
        add_rows(got, rows, torch.tensor([0]))
        reference.add_rows(want, rows, torch.tensor([0]))
        assert_same_bytes(parts(got), parts(want))

    def test_any_order_and_any_cut(self, isa: str) -> None:
        rows, ids = torch.randn(60, 33) * torch.exp2(torch.randint(-12, 12, (60, 1)).float()), torch.randint(0, 4, (60,))
        whole = IntegerSum.empty((4, 33), -40)
        add_rows(whole, rows, ids)
        for cut in (1, 17, 60):
            order = torch.randperm(60)
            pieces = []
            for some in order.split(cut):
                one = IntegerSum.empty((4, 33), -40)
                add_rows(one, rows[some], ids[some])
                pieces.append(one)
            joined = (sum(p.low for p in pieces), sum(p.high for p in pieces), torch.stack([p.peak for p in pieces]).amax(0))
            assert_same_bytes(joined, parts(whole))
        wanted = value(whole.low, None, -40, 50, torch.empty(4, 33))
        plain, other = torch.zeros(4, 33), torch.zeros(4, 33)
        for r in range(60):
            plain[ids[r]] += rows[r]
            other[ids[59 - r]] += rows[59 - r]
        assert first_mismatch(plain, other), "the control: fp32 sums in another order must differ"
        assert first_mismatch(plain, wanted)

    def test_threads(self) -> None:
        rows, ids = torch.randn(50, 2000), torch.randint(0, 6, (50,))
        wanted = IntegerSum.empty((6, 2000), -40)
        reference.add_rows(wanted, rows, ids)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                got = IntegerSum.empty((6, 2000), -40)
                add_rows(got, rows, ids)
                assert_same_bytes(parts(got), parts(wanted), f"{threads} threads")
        finally:
            torch.set_num_threads(before)

    def test_refusals(self) -> None:
        total = IntegerSum.empty((4, 8))
        for ids in ([0, 4], [-1, 0]):
            with pytest.raises(ValueError, match="local row numbers, 0 to 3"):
                add_rows(total, torch.ones(2, 8), torch.tensor(ids))
        assert not total.low.any()
        with pytest.raises(ValueError, match="low has shape"):
            add_rows(total, torch.ones(2, 9), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="float64"):
            add_rows(total, torch.ones(2, 8).double(), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="contiguous"):
            add_rows(IntegerSum(total.low.t(), total.high.t(), total.peak), torch.ones(2, 4), torch.tensor([0, 1]))
        add_rows(total, torch.ones(0, 8), torch.empty(0, dtype=torch.int64))
        assert not total.low.any()


class TestNormTerms:
    @pytest.mark.parametrize("shape", [(5, 300), (3, 7, 128), (1, 1), (40, 33)], ids=str)
    def test_bytes_are_the_references(self, isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x, dy = torch.randn(shape).to(dtype), (torch.randn(shape) * torch.exp2(torch.randint(-20, 14, shape).float())).to(dtype)
        got, want = IntegerSum.empty(shape[-1:], UNIT, SPLIT), IntegerSum.empty(shape[-1:], UNIT, SPLIT)
        add_norm_terms(got, dy, x, 1e-6)
        reference.add_norm_terms(want, dy, x, 1e-6)
        assert_same_bytes(parts(got), parts(want))

    def test_views_threads_and_specials(self, isa: str) -> None:
        qkv = torch.randn(300, 4, 3, 64)
        x, dy = qkv[:, :, 1], torch.randn(300, 4, 64)
        dy[7, 0, 3], dy[200, 1, 5], dy[200, 1, 6] = 1e4, math.nan, 3e38
        want = IntegerSum.empty((64,), UNIT, SPLIT)
        reference.add_norm_terms(want, dy, x, 1e-6)
        assert want.high.any() and want.peak.item() == math.inf
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                got = IntegerSum.empty((64,), UNIT, SPLIT)
                add_norm_terms(got, dy, x, 1e-6)
                assert_same_bytes(parts(got), parts(want), f"{threads} threads")
        finally:
            torch.set_num_threads(before)

    def test_no_rows(self) -> None:
        total = IntegerSum.empty((8,))
        add_norm_terms(total, torch.ones(0, 8), torch.ones(0, 8), 1e-6)
        assert not total.low.any() and not total.peak.any()
        with pytest.raises(ValueError, match="dy has shape"):
            add_norm_terms(total, torch.ones(2, 7), torch.ones(2, 8), 1e-6)


def counts(n: int, most: int = 62) -> torch.Tensor:
    """Numbers of all lengths, and those around where fp32 and float64 stop being exact."""
    some = torch.randint(-(2**most), 2**most, (n,)) >> torch.randint(0, most, (n,))
    edges = [0, 1, -1, 2**24 - 1, 2**24 + 1, 2**24 + 2, 3 * 2**24 + 2, 2**51 - 1, 2**51, -(2**51), -(2**51) - 1, 2**53 + 1, 2**54 + 2**30 + 1, 2**62]
    some[: len(edges)] = torch.tensor(edges)[:n]
    return some[torch.randperm(n)] if n > len(edges) else some


class TestValue:
    @pytest.mark.parametrize("unit", (-256, -189, -172, -150, -50, 40, 88, 256))
    def test_bytes_are_the_references(self, isa: str, unit: int) -> None:
        for n in (1, 15, 300):
            for low, high in ((counts(n), None), (counts(n, 40), None), (counts(n), counts(n, 50) * torch.randint(0, 2, (n,)))):
                wanted = reference.value(low, high, unit, 40)
                assert_same_bytes(value(low, high, unit, 40, torch.empty(n)), wanted)
                there = low.clone()
                assert_same_bytes(value(there, high, unit, 40, there.view(torch.float32)[:n]), wanted, "in place")

    def test_both_parts_to_their_ends(self, isa: str) -> None:
        edge = torch.tensor([2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 0, -1] * 6)
        high = torch.tensor([2**63 - 1, -(2**63), -(2**63), 2**63 - 1, -1, 0] * 6)
        assert_same_bytes(value(edge, high, -100, 50, torch.empty(36)), reference.value(edge, high, -100, 50))

    @pytest.mark.parametrize("threads", (1, 2, 3))
    def test_in_place_with_threads(self, threads: int) -> None:
        low = torch.randint(-(2**60), 2**60, (100_003,)) >> torch.randint(0, 60, (100_003,))
        wanted = value(low, None, -50, 50, torch.empty(100_003))
        assert_same_bytes(wanted[:2000], reference.value(low[:2000], None, -50, 50))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            got = value(low, None, -50, 50, low.view(torch.float32)[:100_003])
        finally:
            torch.set_num_threads(before)
        assert got.data_ptr() == low.data_ptr()
        assert_same_bytes(got, wanted)

    def test_a_second_rounding_would_differ(self) -> None:
        low = torch.tensor([2**54 + 2**30 + 1])  # just above a tie of fp32; float64 rounds it onto the tie
        got = value(low, None, 0, 50, torch.empty(1))
        assert_same_bytes(got, torch.tensor([float(2**54 + 2**31)]))
        assert first_mismatch(got, low.double().float())

    def test_refusals(self) -> None:
        low = torch.zeros(8, dtype=torch.int64)
        for out, message in (
            (low.view(torch.float32)[1:9], "begins behind it"),
            (torch.empty(7), "out has 7 elements"),
            (torch.empty(16)[::2], "out must be contiguous"),
            (torch.empty(8).double(), "float64"),
        ):
            with pytest.raises(ValueError, match=message):
                value(low, None, 0, 50, out)
        high = torch.zeros(8, dtype=torch.int64)
        with pytest.raises(ValueError, match="lies over high"):
            value(low, high, 0, 50, high.view(torch.float32)[:8])
        with pytest.raises(ValueError, match="not served"):
            value(low, None, 0, 51, torch.empty(8))
        assert value(low[:0], None, 0, 50, torch.empty(0)).shape == (0,)


class TestMemory:
    def test_untouched_zeros_cost_nothing_until_written(self) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        before = resident()
        big = untouched_zeros((1 << 14, 1 << 13))  # a gibibyte
        assert resident() - before < 1 << 26
        assert big.dtype == torch.int64 and not big[::4096].any()
        big[5, 5] = 7
        assert big.sum(1)[:10].tolist() == [0] * 5 + [7] + [0] * 4
        assert resident() - before < 1 << 27
        assert untouched_zeros((0, 3)).shape == (0, 3)

    def test_an_integer_sum_says_what_it_is_made_of(self) -> None:
        total = IntegerSum.empty((2, 3), -30, 40)
        assert total.large == 2.0**10 and total.limit == 2.0**26
        for wrong in (
            {"low": total.low.int()},
            {"high": total.high[:1]},
            {"peak": torch.zeros(())},
            {"split": 51},
            {"split": 23},
            {"unit": 257},
        ):
            with pytest.raises(ValueError, match="integer sum"):
                IntegerSum(**{**total.__dict__, **wrong})
