"""The product's error against float64 is at most twice that of stock fp32."""

import pytest
import torch

from tio_megatron.kernels.linear import linear


def error(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    return float(((got.double() - exact).abs() / scale).square().mean().sqrt())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("k", "leaves"), [(768, 8), (2048, 1), (2048, 8), (4096, 1), (4096, 8)])
def test_error_is_at_most_twice_stock(k, leaves, dtype):
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(rows, k, generator=generator).to(dtype).float() for rows in (64, 256))
    exact = x.double() @ w.double().t()
    scale = x.double().abs() @ w.double().abs().t()
    ours, stock = (error(y, exact, scale) for y in (linear(x, w, leaves=leaves), torch.nn.functional.linear(x, w)))
    assert ours <= 2 * stock
    assert ours < 1e-7


def test_one_long_chain_would_be_worse():
    """Why a leaf is cut in chains: the control, a single ascending sum."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(16, 4096, generator=generator), torch.randn(16, 4096, generator=generator)
    exact, scale = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t()
    total = torch.zeros(16, 16)
    for k in range(4096):
        total += x[:, k, None] * w[None, :, k]
    assert error(total, exact, scale) > 2 * error(linear(x, w, leaves=1), exact, scale)
