"""Weight gradients as exact sums over grains: the definition byte for byte, and every cut of the tokens the same bytes."""

from __future__ import annotations

import math

import pytest
import torch

from tio_megatron.kernels.integer_sum import IntegerSum, add_products, reference, value
from tio_megatron.kernels.linear import matmul
from tio_megatron.testing import assert_same_bytes, first_mismatch

UNIT, SPLIT = -30, 40


def parts(total: IntegerSum) -> tuple[torch.Tensor, ...]:
    return total.low, total.high, total.peak


def bounds(*lengths: int, first: int = 0) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0) + first


def operands(r: int, n: int, k: int, dy_type: torch.dtype = torch.bfloat16, x_type: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    spread = lambda columns: torch.randn(r, columns) * torch.exp2(torch.randint(-6, 7, (r, columns)).float())  # noqa: E731
    return spread(n).to(dy_type), spread(k).to(x_type)


def both(n: int, k: int, dy: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, of: torch.Tensor | None = None, **more: torch.Tensor) -> list[IntegerSum]:
    """The kernel's sums, after they were found equal to the definition's."""
    count = 1 if of is None else len(of) - 1
    got, want = ([IntegerSum.empty((n, k), UNIT, SPLIT) for _ in range(count)] for _ in range(2))
    add_products(got, dy, x, starts=starts, of=of, **more)
    reference.add_products(want, dy, x, starts, bounds(len(starts) - 1) if of is None else of, more.get("order"))
    for e in range(count):
        assert_same_bytes(parts(got[e]), parts(want[e]), f"sum {e}")
    return got


class TestKernelEqualsDefinition:
    @pytest.mark.parametrize("x_type", (torch.float32, torch.bfloat16), ids=str)
    def test_types_and_ragged_tiles(self, isa: str, dtype: torch.dtype, x_type: torch.dtype) -> None:
        for n, k in ((1, 1), (13, 33), (30, 70), (24, 16)):
            dy, x = operands(40, n, k, dtype, x_type)
            both(n, k, dy, x, bounds(8, 8, 0, 3, 21))

    @pytest.mark.parametrize("rows", (1, 255, 256, 257, 600, 1100, 1281))
    def test_grains_of_several_chains(self, isa: str, rows: int) -> None:
        dy, x = operands(rows + 5, 14, 20)
        (total,) = both(14, 20, dy, x, bounds(rows, 5))
        alone = IntegerSum.empty((14, 20), UNIT, SPLIT)
        reference.add_partials(alone, matmul(dy[:rows].t(), x[:rows].t()))
        reference.add_partials(alone, matmul(dy[rows:].t(), x[rows:].t()))
        assert_same_bytes(parts(total), parts(alone), "the partial is the product's")

    def test_more_rows_than_a_pass(self, isa: str) -> None:
        dy, x = operands(2600, 7, 18)
        both(7, 18, dy, x, bounds(700, 300, 100, 0, 900, 600))

    def test_experts_with_order(self, isa: str) -> None:
        # five experts, the second and the last without grains, the fourth with empty ones only
        dy, x = operands(50, 15, 40)
        starts, of = bounds(4, 3, 9, 1, 0, 0, 8, 5), torch.tensor([0, 3, 3, 4, 6, 8, 8])
        order = torch.randint(0, 50, (30,))
        sums = both(15, 40, dy, x, starts, of, order=order)
        assert not sums[1].low.any() and not sums[3].peak.any() and not sums[5].low.any()
        both(15, 40, dy, x, bounds(4, 3, first=9))

    def test_no_rows(self) -> None:
        both(5, 6, torch.ones(0, 5), torch.ones(0, 6), bounds())
        both(5, 6, torch.ones(0, 5), torch.ones(0, 6), bounds(0, 0), torch.tensor([0, 1, 2]))
        both(5, 6, torch.ones(3, 5), torch.ones(3, 6), bounds(0, 0), order=torch.empty(0, dtype=torch.int64))
        both(0, 6, torch.ones(3, 0), torch.ones(3, 6), bounds(3))
        both(5, 0, torch.ones(3, 5), torch.ones(3, 0), bounds(3))

    def test_strided_operands_and_targets(self, isa: str) -> None:
        dy, x = operands(20, 40, 90)
        want = both(15, 30, dy[:, 5:20].contiguous(), x[:, ::3].contiguous(), bounds(12, 8))[0]
        low, high = torch.full((15, 64), 3), torch.full((15, 50), 5)
        got = IntegerSum(low[:, 4:34], high[:, 7:37], torch.zeros(1), UNIT, SPLIT)
        add_products(got, dy[:, 5:20], x[:, ::3], starts=bounds(12, 8))
        assert_same_bytes((got.low - 3, got.high - 5, got.peak), parts(want))
        low[:, 4:34], high[:, 7:37] = 3, 5
        assert (low == 3).all() and (high == 5).all(), "nothing beside the target"

    def test_units_of_their_own(self, isa: str) -> None:
        dy, x = operands(12, 6, 10)
        got, want = ([IntegerSum.empty((6, 10), unit, split) for unit, split in ((-40, 50), (-10, 30))] for _ in range(2))
        add_products(got, dy, x, starts=bounds(4, 8), of=torch.tensor([0, 1, 2]))
        reference.add_products(want, dy, x, bounds(4, 8), torch.tensor([0, 1, 2]))
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(parts(a), parts(b))


class TestRareValues:
    def test_partials_of_every_size(self, isa: str) -> None:
        # one row to a grain: partials are products, from subnormal through ties to beyond the limit
        values = torch.tensor([2.0**e * s for e in (-149, -130, UNIT - 2, UNIT - 1, UNIT, 0, 9, 10, 11, 25, 26, 120) for s in (1, -1, 1.5, 1 + 2.0**-23)])
        dy, x = torch.ones(3, 13), torch.stack([values, values.roll(1), torch.full_like(values, -0.0)])
        (total,) = both(13, len(values), dy, x, bounds(1, 1, 1))
        assert total.high.any() and total.peak.item() == values.abs().max().item()
        both(13, len(values), dy, x, bounds(*[1] * 12), order=torch.arange(12) % 3)

    @pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
    def test_not_finite(self, isa: str, bad: float) -> None:
        for where in ("dy", "x"):
            dy, x = operands(9, 14, 37, torch.float32, torch.float32)
            (dy if where == "dy" else x)[4, 3] = bad
            (total,) = both(14, 37, dy, x, bounds(3, 3, 3))
            assert total.peak.item() == math.inf
            add_products(total, dy[:1], x[:1], starts=bounds(1))
            assert total.peak.item() == math.inf, "once infinite, it stays"

    def test_an_overflowing_product(self, isa: str) -> None:
        (total,) = both(2, 3, torch.full((4, 2), 1e30), torch.full((4, 3), 1e30), bounds(2, 2))
        assert total.peak.item() == math.inf and not total.low.any() and not total.high.any()

    def test_signed_zeros_and_cancelled_sums(self, isa: str) -> None:
        dy, x = torch.tensor([[1.0], [-1.0]]), torch.full((2, 4), 3.0)
        (total,) = both(1, 4, dy, x, bounds(1, 1))
        assert_same_bytes(value(total.low, total.high, UNIT, SPLIT, torch.empty(1, 4)), torch.zeros(1, 4))


class TestOrderIsFree:
    """Two samples' grains, over calls, ranks, samples and micro-batches."""

    def setup_method(self) -> None:
        torch.manual_seed(1)
        self.dy, self.x = operands(200, 26, 45)
        self.lengths = [64, 64, 17, 3, 52]
        self.starts = bounds(*self.lengths)
        self.whole = IntegerSum.empty((26, 45), UNIT, SPLIT)
        reference.add_products([self.whole], self.dy, self.x, self.starts, torch.tensor([0, 5]))

    def test_any_split_of_grains_over_sums(self, isa: str) -> None:
        for owners in ([0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [2, 1, 0, 1, 2], [4, 3, 2, 1, 0]):
            ranks = [IntegerSum.empty((26, 45), UNIT, SPLIT) for _ in range(5)]
            for g in torch.randperm(5).tolist():
                add_products(ranks[owners[g]], self.dy, self.x, starts=self.starts[g : g + 2])
            joined = (sum(r.low for r in ranks), sum(r.high for r in ranks), torch.stack([r.peak for r in ranks]).amax(0))
            assert_same_bytes(joined, parts(self.whole), str(owners))

    def test_any_order_of_grains_in_one_call(self, isa: str) -> None:
        grains = [2, 0, 4, 1, 3]
        rows = torch.cat([torch.arange(int(self.starts[g]), int(self.starts[g + 1])) for g in grains])
        got = IntegerSum.empty((26, 45), UNIT, SPLIT)
        add_products(got, self.dy, self.x, starts=bounds(*(self.lengths[g] for g in grains)), order=rows)
        assert_same_bytes(parts(got), parts(self.whole))

    def test_cuts_of_either_axis(self, isa: str) -> None:
        got = IntegerSum.empty((26, 45), UNIT, SPLIT)
        for rows in (slice(0, 5), slice(5, 26)):
            for columns in (slice(0, 16), slice(16, 45)):
                one = IntegerSum(got.low[rows, columns], got.high[rows, columns], got.peak, UNIT, SPLIT)
                add_products(one, self.dy[:, rows], self.x[:, columns], starts=self.starts)
        assert_same_bytes(parts(got), parts(self.whole))

    def test_negative_controls(self) -> None:
        partials = [matmul(self.dy[a:b].t(), self.x[a:b].t()) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
        forward, back = sum(partials[1:], partials[0]), sum(partials[-2::-1], partials[-1])
        assert first_mismatch(forward, back), "fp32 sums of the partials in another order must differ"
        other = IntegerSum.empty((26, 45), UNIT, SPLIT)
        add_products(other, self.dy, self.x, starts=bounds(64, 64, 17, 4, 51))
        assert first_mismatch(other.low, self.whole.low), "other grains must give other bytes"
        whole = IntegerSum.empty((26, 45), UNIT, SPLIT)
        swapped = torch.cat([torch.arange(32, 64), torch.arange(32), torch.arange(64, 200)])
        add_products(whole, self.dy, self.x, starts=self.starts, order=swapped)
        assert first_mismatch(whole.low, self.whole.low), "another order inside a grain must give other bytes"

    def test_threads(self) -> None:
        dy, x = operands(300, 130, 260)
        starts, of = bounds(*[10] * 30), torch.tensor([0, 9, 9, 30])
        before, found = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                sums = [IntegerSum.empty((130, 260), UNIT, SPLIT) for _ in range(3)]
                add_products(sums, dy, x, starts=starts, of=of)
                found.append([parts(s) for s in sums])
        finally:
            torch.set_num_threads(before)
        assert_same_bytes(found[1], found[0])
        assert_same_bytes(found[2], found[0])


def test_more_numbers_than_the_scratch_memory_holds(isa: str) -> None:
    dy, x = torch.randn(60_000, 40).bfloat16(), torch.randn(60_000, 36).bfloat16()
    got, want = IntegerSum.empty((40, 36), UNIT, SPLIT), IntegerSum.empty((40, 36), UNIT, SPLIT)
    add_products(got, dy, x, starts=bounds(60_000))
    reference.add_partials(want, matmul(dy.t(), x.t()))
    assert_same_bytes(parts(got), parts(want))


def test_refusals() -> None:
    total = IntegerSum.empty((4, 5))
    dy, x = torch.ones(6, 4), torch.ones(6, 5)
    wrong = [
        ({"starts": torch.tensor([0, 7])}, "starts must ascend"),
        ({"starts": torch.tensor([0, 4, 3])}, "starts must ascend"),
        ({"starts": torch.tensor([-1, 4])}, "starts must ascend"),
        ({"starts": torch.tensor([0, 3]), "of": torch.tensor([0, 2])}, "of must ascend"),
        ({"starts": torch.tensor([0, 3]), "of": torch.tensor([0, 1, 1])}, "of has shape"),
        ({"starts": torch.tensor([0, 3]), "order": torch.tensor([0, 1])}, "starts must ascend"),
        ({"starts": torch.tensor([0, 2]), "order": torch.tensor([0, 6])}, "row numbers below 6"),
        ({"starts": torch.tensor([0, 2], dtype=torch.int32)}, "starts is torch.int32"),
        ({"starts": torch.empty(0, dtype=torch.int64)}, "starts is empty"),
    ]
    for more, message in wrong:
        with pytest.raises(ValueError, match=message):
            add_products(total, dy, x, **more)
    starts = torch.tensor([0, 6])
    for a, b, message in (
        (dy[:5], x, "are not \\[R, N\\]"),
        (dy.double(), x, "float64"),
        (dy, x.half(), "float16"),
        (dy[:, :3], x, "low has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            add_products(total, a, b, starts=starts)
    with pytest.raises(ValueError, match="2 sums need `of`"):
        add_products([total, total], dy, x, starts=starts)
    with pytest.raises(ValueError, match="at least one sum"):
        add_products([], dy, x, starts=starts, of=torch.tensor([0]))
    assert not total.low.any() and not total.peak.any()
