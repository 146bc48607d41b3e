"""SiLU and SwiGLU: the reference's bytes, and the two roundings where they are said to be."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels import swiglu
from tio_megatron.kernels.swiglu import reference
from tio_megatron.testing import assert_same_bytes, first_mismatch


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 3, 128), (5, 66)])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 8).to(dtype)
    x.view(-1)[:2] = torch.tensor([-0.0, 100.0])
    dy, dhalf = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    assert_same_bytes(swiglu.silu(x), reference.silu(x))
    assert_same_bytes(swiglu.silu_backward(dy, x), reference.silu_backward(dy, x))
    assert_same_bytes(swiglu.swiglu(x), reference.swiglu(x))
    assert_same_bytes(swiglu.swiglu_backward(dhalf, x), reference.swiglu_backward(dhalf, x))


def test_two_roundings() -> None:
    """Pain 13: without the rounding between SiLU and the product the bytes are others."""
    x = torch.randn(64, 256).bfloat16()
    gate, up = x.chunk(2, -1)
    y = swiglu.swiglu(x)
    assert_same_bytes(y, swiglu.silu(gate) * up)
    assert first_mismatch(y, (swiglu.silu(gate.float()) * up.float()).bfloat16())


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("nan"), -200.0])
    assert_same_bytes(swiglu.silu(x), torch.tensor([0.0, -0.0, float("inf"), float("nan"), -0.0]))


def test_empty_and_autograd() -> None:
    assert swiglu.swiglu(torch.empty(0, 8)).shape == (0, 4)
    assert swiglu.swiglu_backward(torch.empty(0, 4), torch.empty(0, 8)).shape == (0, 8)
    x, dy = torch.randn(4, 8, requires_grad=True), torch.randn(4, 4)
    assert_same_bytes(torch.autograd.grad(swiglu.swiglu(x), x, dy)[0], swiglu.swiglu_backward(dy, x.detach()))
    assert_same_bytes(torch.autograd.grad(swiglu.silu(x), x, x.detach())[0], swiglu.silu_backward(x.detach(), x.detach()))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="equal length"):
        swiglu.swiglu(torch.ones(2, 3))
    with pytest.raises(ValueError, match="float16"):
        swiglu.silu(torch.ones(2).half())
