"""exp, log and the tree's sum: bytes of the reference everywhere, defined at every special value, accurate."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.contract import ReductionTree
from tio_megatron.kernels import math
from tio_megatron.kernels.exact import fma, sqrt
from tio_megatron.kernels.math import reference
from tio_megatron.testing import assert_same_bytes, first_mismatch

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-45,
    1e-38,
    88.72283,
    88.72284,
    89.0,
    -87.33655,
    -103.97,
    -104.0,
    3e38,
    -3e38,
]


def _everywhere() -> torch.Tensor:
    """Every 60013th bit pattern of fp32, and the special values."""
    codes = torch.arange(-(2**31), 2**31, 60013, dtype=torch.int64).to(torch.int32)
    return torch.cat([torch.tensor(SPECIAL), codes.view(torch.float32)])


@pytest.mark.parametrize("name", ["exp", "log"])
def test_bytes_are_the_references(isa: str, name: str) -> None:
    x = _everywhere()
    assert_same_bytes(getattr(math, name)(x), getattr(reference, name)(x))


def test_place_decides_nothing(isa: str) -> None:
    x = torch.randn(67) * 20
    whole = math.exp(x)
    for i in range(67):
        assert_same_bytes(math.exp(x[i : i + 1]), whole[i : i + 1])


def test_special_values() -> None:
    x = torch.tensor(SPECIAL)
    assert_same_bytes(math.exp(torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])), torch.tensor([1.0, 1.0, float("inf"), 0.0, float("nan")]))
    assert_same_bytes(
        math.log(torch.tensor([0.0, -0.0, float("inf"), 1.0, -1.0])), torch.tensor([-float("inf"), -float("inf"), float("inf"), 0.0, float("nan")])
    )
    assert (math.exp(x) >= 0)[~x.isnan()].all()


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8, 13])
def test_tree_add(isa: str, parts: int) -> None:
    x = torch.randn(parts, 3, 37) * 10.0 ** torch.randint(-3, 4, (parts, 3, 37))
    x[:, 0, 5] = -0.0
    assert_same_bytes(math.tree_add(x), ReductionTree(parts).reduce(list(x)))
    if parts > 3:
        control = x[0]
        for p in x[1:]:
            control = control + p
        assert first_mismatch(math.tree_add(x), control), "the inputs do not tell the tree from a chain"


def test_flush_to_zero_of_the_caller_changes_nothing() -> None:
    x = torch.tensor([-100.0, -95.0])
    wanted = math.exp(x)
    assert (wanted > 0).all()
    torch.set_flush_denormal(True)
    try:
        bits = math.exp(x).view(torch.int32)
        still_on = (torch.tensor([1e-40]) * 0.5).view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert_same_bytes(bits, wanted.view(torch.int32))
    assert still_on, "the caller's mode was not given back"


def test_exact_fma_is_one_rounding() -> None:
    import numpy as np

    a, b, c = (torch.randn(20000) * 2.0 ** torch.randint(-60, 60, (20000,)) for _ in range(3))
    exact = a.numpy().astype(np.longdouble) * b.numpy().astype(np.longdouble) + c.numpy().astype(np.longdouble)
    got = fma(a, b, c)
    error = np.abs(got.numpy().astype(np.longdouble) - exact)
    other = np.minimum(np.abs(torch.nextafter(got, got + 1).numpy() - exact), np.abs(torch.nextafter(got, got - 1).numpy() - exact))
    assert (error <= other * (1 + 1e-6)).all()
    values = torch.rand(1000)
    assert_same_bytes(sqrt(values), torch.from_numpy(np.sqrt(values.numpy())))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="torch.float32"):
        math.exp(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one part"):
        math.tree_add(torch.ones(0, 3))
