"""RMSNorm: the kernel's bytes are the reference's, a row never sees another, and the rounding points are where they are said to be."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels import norm
from tio_megatron.kernels.exact import chain_dot, row_dot
from tio_megatron.kernels.norm import reference
from tio_megatron.testing import assert_same_bytes, first_mismatch

EPS = 1e-6


@pytest.mark.parametrize("rows, h", [(1, 1), (3, 7), (1, 256), (17, 128), (5, 300), (2, 1100), (33, 520)])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, rows: int, h: int) -> None:
    x, residual, dy, w = torch.randn(rows, h).to(dtype), torch.randn(rows, h).to(dtype), torch.randn(rows, h).to(dtype), torch.randn(h).to(dtype)
    assert_same_bytes(norm.rms_norm(x, w, EPS), reference.rms_norm(x, w, EPS))
    assert_same_bytes(norm.add_rms_norm(x, residual, w, EPS), reference.add_rms_norm(x, residual, w, EPS))
    assert_same_bytes(norm.rms_norm_backward(dy, x, w, EPS), reference.rms_norm_backward(dy, x, w, EPS))


def test_sum_over_many_rows_is_a_tree_of_chains(isa: str) -> None:
    dy, x, w = torch.randn(600, 20), torch.randn(600, 20), torch.randn(20)
    assert_same_bytes(norm.rms_norm_backward(dy, x, w, EPS)[1], reference.rms_norm_backward(dy, x, w, EPS)[1])


def test_control_one_long_chain_differs() -> None:
    x = torch.randn(64, 2048)
    assert first_mismatch(row_dot(x, x), chain_dot(x, x)), "the inputs do not tell the orders apart"


@pytest.mark.parametrize("shape, axes", [((6, 4, 24, 64), (1, 0, 2, 3)), ((5, 9, 64), (0, 1, 2)), ((4, 3, 2, 64), (2, 0, 1, 3))])
def test_views_are_read_in_place(isa: str, dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    whole = torch.randn(shape).to(dtype).permute(axes)
    view, w = whole[..., 1:, :], torch.randn(shape[-1]).to(dtype)
    assert_same_bytes(norm.rms_norm(view, w, EPS), norm.rms_norm(view.contiguous(), w, EPS))
    every_other = torch.randn(4, 128).to(dtype)[:, ::2]
    assert_same_bytes(norm.rms_norm(every_other, w, EPS), norm.rms_norm(every_other.contiguous(), w, EPS))


def test_a_row_does_not_see_its_batch(isa: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(40, 300).to(dtype), torch.randn(300).to(dtype)
    x[7] = float("nan")
    whole = norm.rms_norm(x, w, EPS)
    for rows in ([0], [3, 39], list(range(8, 40))):
        assert_same_bytes(norm.rms_norm(x[rows], w, EPS), whole[rows])
    assert whole[7].isnan().all() and not whole[:7].isnan().any() and not whole[8:].isnan().any()


def test_the_residual_sum_is_rounded_before_its_variance() -> None:
    """Pains 6 and 16: both other rounding points give other bytes, so the stated one is the one in force."""
    x, residual, w = (torch.randn(s).bfloat16() for s in ((64, 256), (64, 256), (256,)))
    y, total = norm.add_rms_norm(x, residual, w, EPS)
    assert_same_bytes(total, x + residual)
    assert_same_bytes(y, norm.rms_norm(x + residual, w, EPS))
    unrounded = norm.rms_norm(x.float() + residual.float(), w.float(), EPS).bfloat16()
    assert first_mismatch(y, unrounded)
    cast_first = norm.rms_norm(x + residual, torch.ones_like(w), EPS) * w
    assert first_mismatch(y, cast_first)


def test_zero_rows_and_signed_zero(isa: str, dtype: torch.dtype) -> None:
    w = torch.tensor([1.0, -1.0, 2.0, 1.0]).to(dtype)
    assert norm.rms_norm(torch.empty(0, 4, dtype=dtype), w, EPS).shape == (0, 4)
    dx, dw = norm.rms_norm_backward(torch.empty(0, 4, dtype=dtype), torch.empty(0, 4, dtype=dtype), w, EPS)
    assert dx.shape == (0, 4)
    assert_same_bytes(dw, torch.zeros(4))
    y = norm.rms_norm(torch.tensor([[0.0, 0.0, -0.0, 0.0]]).to(dtype), w, EPS)
    assert y.signbit().tolist() == [[False, True, True, False]]


def test_autograd_is_the_backward() -> None:
    x, w, dy = torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True), torch.randn(5, 64)
    assert_same_bytes(torch.autograd.grad(norm.rms_norm(x, w, EPS), (x, w), dy), norm.rms_norm_backward(dy, x.detach(), w.detach(), EPS))
    y, total = norm.add_rms_norm(x, x.detach(), w, EPS)
    dx = torch.autograd.grad((y, total), x, (dy, dy))[0]
    assert_same_bytes(dx, norm.rms_norm_backward(dy, total.detach(), w.detach(), EPS)[0] + dy)


@pytest.mark.parametrize(
    "x, w, says",
    [
        (torch.ones(2, 4), torch.ones(5), "w has shape"),
        (torch.ones(2, 4).double(), torch.ones(4), "float64"),
        (torch.ones(2, 0), torch.ones(0), "must not be empty"),
    ],
)
def test_refusals(x: torch.Tensor, w: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        norm.rms_norm(x, w, EPS)
