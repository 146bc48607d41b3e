"""What a training step adds, in Triton: exact sums over tokens, the norm of a gradient, clipping and Adam, against the references and the product."""

import math

import pytest
import torch

from tio_megatron.kernels.adam import Scalars
from tio_megatron.kernels.adam import reference as adam_reference
from tio_megatron.kernels.adam import triton as adam
from tio_megatron.kernels.integer_sum import IntegerSum, add_rows
from tio_megatron.kernels.integer_sum import reference as sum_reference
from tio_megatron.kernels.integer_sum import triton as integer_sum
from tio_megatron.kernels.linear import triton as linear
from tio_megatron.kernels.squares import NUMBERS, value
from tio_megatron.kernels.squares import reference as squares_reference
from tio_megatron.kernels.squares import triton as squares
from tio_megatron.testing import assert_same_bytes


def empty(*shape, unit=-40, split=40):
    where = torch.zeros(1).device
    return IntegerSum(*(torch.zeros(shape, dtype=torch.int64, device=where) for _ in range(2)), torch.zeros(1), unit, split)


def parts(total):
    return total.low, total.high, total.peak


def same(ours, theirs, what):
    for name, a, b in zip(("low", "high", "peak"), parts(ours), parts(theirs), strict=True):
        assert_same_bytes(a, b, f"{what}, {name}")


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", [-30, -45])
def test_grains_of_products(gradient, unit):
    """Each grain's partial is the product's; -45: large partials go to ``high``. Two sums, rows in any order, a grain without rows."""
    dy, x, order = (bf16(90, 70) * 3).to(gradient), bf16(90, 40), torch.randperm(90)
    starts, of = torch.tensor([0, 5, 70, 70, 90]), torch.tensor([0, 2, 4])
    ours, theirs = [empty(70, 40, unit=unit) for _ in range(2)], [empty(70, 40, unit=unit) for _ in range(2)]
    integer_sum.add_products(*map(list, zip(*map(parts, ours), strict=True)), [unit] * 2, [40] * 2, dy, x, starts, of, order)
    for e, total in enumerate(theirs):
        for g in range(2 * e, 2 * e + 2):
            rows = order[starts[g] : starts[g + 1]]
            if len(rows):
                sum_reference.add_partials(total, linear.matmul(dy[rows].t(), x[rows].t(), 1, False, torch.float32))
        same(ours[e], theirs[e], f"sum {e}")
    assert bool(ours[0].high.any()) == (unit == -45)
    again = [empty(70, 40, unit=unit) for _ in range(2)]
    for g in (3, 0, 1):
        e = g // 2
        integer_sum.add_products(*([part] for part in parts(again[e])), [unit], [40], dy, x, starts[g : g + 2], torch.tensor([0, 1]), order)
    same(again[0], ours[0], "grain by grain")
    with pytest.raises(AssertionError):
        other = empty(70, 40, unit=unit)
        integer_sum.add_products(*([part] for part in parts(other)), [unit], [40], dy, x, torch.tensor([0, 70]), torch.tensor([0, 1]), order)
        same(other, ours[0], "one grain where there are two")


def test_rows_and_norm_terms():
    ours, theirs, rows, ids = empty(6, 20), empty(6, 20), bf16(9, 20), torch.randint(0, 6, (9,))
    integer_sum.add_rows(*parts(ours), -40, 40, rows, ids)
    sum_reference.add_rows(theirs, rows, ids)
    same(ours, theirs, "rows")
    ours, theirs, dy, x = empty(48), empty(48), bf16(70, 48), bf16(70, 48)
    integer_sum.add_norm_terms(*parts(ours), -40, 40, dy, x, 1e-6)
    sum_reference.add_norm_terms(theirs, dy, x, 1e-6)
    same(ours, theirs, "norm")
    dy[3, 3] = float("nan")
    integer_sum.add_norm_terms(*parts(ours), -40, 40, dy, x, 1e-6)
    assert ours.peak.item() == math.inf


def hard(unit, split):
    """Numbers around every edge of a sum: what is counted, half of it and its neighbours, where ``high`` begins and ends, subnormals, zeros, the largest."""
    edges = (unit - 2, unit - 1, unit, unit + 1, unit + 23, unit + 24, unit + split - 1, unit + split, unit + 2 * split - 25, unit + 2 * split - 24)
    found = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126, (1 - 2.0**-23) * 2.0**-126, (2 - 2.0**-23) * 2.0**127]
    for edge in edges:
        found += [m * 2.0**edge for m in (1 - 2.0**-24, 1.0, 1 + 2.0**-23, 1.5, 1.5 + 2.0**-23, 2.5, 3.5) if m * 2.0**edge < 2.0**128]
    spread = (torch.randn(200, generator=torch.Generator().manual_seed(1)).double() * torch.logspace(-46, 38, 200, dtype=torch.float64)).float().tolist()
    return torch.tensor([*found, *(-x for x in found), *spread], dtype=torch.float32)


EDGES = [(-256, 50), (-256, 24), (-200, 30), (-160, 24), (-149, 24), (-126, 40), (-50, 50), (-40, 40), (-40, 48), (-34, 34), (0, 24), (60, 40), (256, 50)]


@pytest.mark.parametrize(("unit", "split"), EDGES)
def test_partials_at_every_edge(unit, split):
    """The bytes of the definition, which takes float64, by kernels that have none; and of the CPU's kernel."""
    rows = hard(unit, split)
    ids = torch.zeros(1, dtype=torch.int64)
    for n, one in enumerate(rows.split(40)):
        ours, theirs, cpu = (empty(1, len(one), unit=unit, split=split) for _ in range(3))
        integer_sum.add_rows(*parts(ours), unit, split, one[None], ids)
        sum_reference.add_rows(theirs, one[None], ids)
        same(ours, theirs, f"unit {unit}, split {split}, part {n}")
        if not torch.get_default_device().type.startswith("cuda"):
            add_rows(cpu, one[None], ids)
            same(ours, cpu, f"the CPU's kernel, part {n}")


def test_another_unit_is_seen():
    """Negative control."""
    rows, ids, found = hard(-40, 40)[None], torch.zeros(1, dtype=torch.int64), []
    for unit in (-40, -39):
        found.append(empty(1, rows.shape[1]))
        integer_sum.add_rows(*parts(found[-1]), unit, 40, rows, ids)
    with pytest.raises(AssertionError):
        same(*found, "counts twice as large")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_and_not_counted(bad):
    rows, ids = torch.tensor([[1.0, bad, -0.0, 0.0]]), torch.zeros(1, dtype=torch.int64)
    ours, theirs = empty(1, 4), empty(1, 4)
    integer_sum.add_rows(*parts(ours), -40, 40, rows, ids)
    sum_reference.add_rows(theirs, rows, ids)
    same(ours, theirs, str(bad))
    assert ours.peak.item() == math.inf and ours.low.tolist() == [[0] * 4] and ours.high.tolist() == [[2**24, 0, 0, 0]]


@pytest.mark.parametrize("unit", [-256, -200, -160, -149, -126, -40, 40, 100, 256])
def test_the_value_is_rounded_once(unit):
    """Ties, neighbours of ties, results that are subnormal or infinite, negative numbers that vanish."""
    low = torch.randint(-(2**62), 2**62, (60,))
    low[:8] = torch.tensor([0, 1, -1, 2**25 + 1, -(2**25) - 1, 2**50 + 2**26, 2**50 + 2**26 + 1, -(2**40) - 2**16])
    high = torch.randint(-(2**61), 2**61, (60,)) >> torch.arange(60)
    for given in (None, high):
        out = torch.empty(60)
        integer_sum.sum_value(low, given, unit, 40, out)
        assert_same_bytes(out, sum_reference.value(low, given, unit, 40), f"unit {unit}")


def test_adam():
    state = [torch.randn(70), torch.randn(70), torch.randn(70) * 0.1, torch.rand(70) * 0.01]
    for decoupled in (True, False):
        s = Scalars.at(3, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=decoupled)
        mine, rounded = [t.clone() for t in state], torch.empty(70, dtype=torch.bfloat16)
        adam.adam_(*mine, rounded, [s.beta1, s.new1, s.beta2, s.new2, s.eps, s.decay, s.rate, s.correction], decoupled)
        for name, got, want in zip(("weight", "exp_avg", "exp_avg_sq"), (mine[0], *mine[2:]), adam_reference.adam(*state, s), strict=True):
            assert_same_bytes(got, want, name)
        assert_same_bytes(rounded, mine[0].bfloat16(), "the model's weight")


def test_squares_and_clipping():
    x = torch.cat([torch.randn(3000) * torch.logspace(-44, 38, 3000).clamp(max=3e38), torch.tensor([0.0, -0.0, 1e-45, 3.4e38])])
    total = torch.zeros(NUMBERS, dtype=torch.int64)
    squares.add_squares_(total, x[:1000])
    squares.add_squares_(total, x[1000:])
    assert value(total) == squares_reference.value(x) and bool((total[:-3] < 2**32).all())
    squares.add_squares_(total, torch.tensor([float("inf"), float("nan"), -float("inf")]))
    assert total[-2:].tolist() == [2, 1]
    y = x.clone()
    squares.scale_(y, 0.3)
    assert_same_bytes(y, squares_reference.scale(x, 0.3), "scale")
