"""Exact sums over tokens against float64: the gradient's error is at most that of fp32 sums, for small elements beside large ones too."""

import torch

from tio_megatron.kernels.integer_sum import IntegerSum, add_norm_terms, add_products, value
from tio_megatron.kernels.linear import matmul


def unit_of(peak: float) -> int:
    """40 bits below the largest partial."""
    return int(torch.tensor(peak).frexp().exponent) - 40


def summed(total: IntegerSum) -> torch.Tensor:
    return value(total.low, total.high, total.unit, total.split, torch.empty(total.low.shape)).double()


def test_weight_gradient():
    generator = torch.Generator().manual_seed(0)
    # elements over six decades, as rows and columns of real gradients are
    scale = torch.logspace(-3, 0, 64)
    dy = torch.randn(1024, 64, generator=generator) * scale
    x = torch.randn(1024, 96, generator=generator) * torch.logspace(0, -3, 96)
    exact = dy.double().t() @ x.double()
    size = dy.double().abs().t() @ x.double().abs()
    starts = torch.arange(0, 1025, 32)
    partials = [matmul(dy[lo : lo + 32].t(), x[lo : lo + 32].t()) for lo in range(0, 1024, 32)]
    total = IntegerSum.empty((64, 96), unit_of(max(float(p.abs().max()) for p in partials)))
    add_products(total, dy, x, starts=starts)
    fp32 = sum(partials[1:], partials[0]).double()
    ours, theirs = (((got - exact).abs() / size).square().mean().sqrt() for got in (summed(total), fp32))
    assert ours <= theirs and ours < 1e-7
    # the smallest elements, a million times below the largest, lose to the grid no more than an fp32 gradient would by itself
    small = exact.abs() < 1e-5 * exact.abs().max()
    assert small.sum() > 100 and ((summed(total) - exact).abs() / size)[small].max() < 1e-5


def test_coarse_grids_would_not_do():
    """The control: 24 bits below the maximum, as an fp32 number keeps them, lose small elements."""
    dy, x = torch.full((64, 1), 1e-4), torch.tensor([[1.0, 1e-4]]).repeat(64, 1)
    exact = dy.double().t() @ x.double()
    errors = []
    for bits in (40, 24):
        total = IntegerSum.empty((1, 2), int(torch.tensor(1e-4).frexp().exponent) - bits)
        add_products(total, dy, x, starts=torch.arange(65))
        errors.append(float(((summed(total) - exact).abs() / exact)[0, 1]))
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


def test_norm_weight_gradient():
    generator = torch.Generator().manual_seed(2)
    x, dy = torch.randn(500, 128, generator=generator), torch.randn(500, 128, generator=generator)
    exact = (dy.double() * x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt()).sum(0)
    total = IntegerSum.empty((128,), unit_of(20.0))
    add_norm_terms(total, dy, x, 1e-6)
    assert ((summed(total) - exact).abs().max() / exact.abs().max()) < 1e-6
