"""What a product's deviation is said to be, where it is no larger than the roundings of its type: a bias only where all rows share it."""

import pytest
import torch

from tio_megatron.verify.diagnosis.held import Rows, not_other_weights

BF16 = torch.bfloat16


def rows(seed, change):
    noise = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(shape, generator=noise, dtype=torch.float64) for shape in ((40 + 3 * seed, 64), (24, 64)))
    exact = x @ w.t()
    return Rows(x, exact, change(x, w, exact, noise))


def two_halves(x, w, exact, noise):
    """Partial sums kept in bf16, added in bf16."""
    first, second = ((a @ b.t()).to(BF16) for a, b in zip(x.chunk(2, -1), w.chunk(2, -1), strict=True))
    return (first + second).double()


@pytest.mark.parametrize("seed", range(6))
def test_narrow_partial_sums_are_no_bias(seed):
    reason, cure = not_other_weights([rows(seed, two_halves)], BF16)
    assert reason and "bias" not in reason + cure, reason


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [0.004, 0.02, 0.3])
def test_a_bias_of_any_size_is_one(size, seed):
    def biased(x, w, exact, noise):
        vector = size * exact.square().mean().sqrt() * torch.randn(exact.shape[1], generator=noise, dtype=torch.float64)
        return (exact + vector).to(BF16).double()

    reason, _ = not_other_weights([rows(seed, biased)], BF16)
    assert "a bias that the other side lacks" in reason, reason
