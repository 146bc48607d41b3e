"""Adam: the reference's bytes on every instruction set, whatever piece of a tensor a rank holds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tio_megatron.kernels.adam import Scalars, adam_, power, reference
from tio_megatron.testing import assert_same_bytes, first_mismatch

HARD = [0.0, -0.0, 1e-42, -3e-39, 1e-20, 3e38, -3e38, float("inf"), float("nan")]
"""Zeros, subnormals, squares that underflow and overflow, and what is not a number."""


def state(shape, hard=True):
    weight, grad, exp_avg, exp_avg_sq = torch.randn(shape), torch.randn(shape) * 1e-3, torch.randn(shape) * 1e-3, torch.rand(shape) * 1e-6
    if hard:
        n = min(len(HARD), weight.numel())
        grad.view(-1)[:n] = torch.tensor(HARD[:n])
    return weight, grad, exp_avg, exp_avg_sq


def scalars(step=3, weight_decay=0.1, decoupled=True, **fields):
    return Scalars.at(step, **dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay, decoupled=decoupled) | fields)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("shape", [(1,), (7,), (33, 65), (2, 3, 16)])
@pytest.mark.parametrize("step", [1, 1000])
def test_bytes_are_the_references(isa: str, shape: tuple[int, ...], decoupled: bool, step: int) -> None:
    weight, grad, exp_avg, exp_avg_sq = state(shape)
    kept = grad.clone()
    s = scalars(step, decoupled=decoupled)
    wanted = reference.adam(weight, grad, exp_avg, exp_avg_sq, s)
    out = torch.empty(shape, dtype=torch.bfloat16)
    adam_(weight, grad, exp_avg, exp_avg_sq, s, out)
    assert_same_bytes((weight, exp_avg, exp_avg_sq), wanted)
    assert_same_bytes(out, weight.bfloat16(), "the bf16 copy")
    assert_same_bytes(grad, kept, "the gradient is read only")


def test_a_shard_has_the_bytes_of_the_whole(isa: str) -> None:
    whole = state((3001,))
    parts = [tensor.clone() for tensor in whole]
    adam_(*whole, scalars())
    for begin, end in ((0, 5), (5, 1029), (1029, 3001)):
        adam_(*(part[begin:end] for part in parts), scalars())
    assert_same_bytes(parts, list(whole))


def test_threads_change_nothing(isa: str) -> None:
    first = state((200_000,))
    second = [tensor.clone() for tensor in first]
    adam_(*first, scalars())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        adam_(*second, scalars())
    finally:
        torch.set_num_threads(before)
    assert_same_bytes(second, list(first))


def test_the_bytes_differ_from_torchs() -> None:
    """Negative control: the same rule with other roundings."""
    weight, grad, *_ = state((4096,), hard=False)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = grad
    torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1).step()
    adam_(weight, grad, torch.zeros(4096), torch.zeros(4096), scalars(1))
    assert first_mismatch(weight, parameter.detach())


def test_no_decay_and_no_gradient_leave_a_weight_as_it_is(isa: str) -> None:
    weight = torch.tensor([1.5, -3e38, 1e-42, 0.0])
    moved = weight.clone()
    adam_(moved, torch.zeros(4), torch.zeros(4), torch.zeros(4), scalars(weight_decay=0.0))
    assert_same_bytes(moved, weight)


def test_the_step_and_autograd_see_the_write() -> None:
    weight, grad, exp_avg, exp_avg_sq = state((4,))
    before = weight._version
    adam_(weight, grad, exp_avg, exp_avg_sq, scalars())
    assert weight._version > before


def test_empty() -> None:
    adam_(*(torch.empty(0) for _ in range(4)), scalars(), torch.empty(0, dtype=torch.bfloat16))


def test_powers_need_no_library() -> None:
    for base in (0.9, 0.95, 0.999):
        for exponent in (1, 2, 3, 17, 1000):
            assert abs(Fraction(power(base, exponent)) / Fraction(base) ** exponent - 1) < 2.0**-43
    assert power(0.9, 3) == 0.9 * (0.9 * 0.9)


@pytest.mark.parametrize(
    "fields, said",
    [(dict(lr=-1.0), "lr is -1.0"), (dict(betas=(1.0, 0.9)), "beta1 is 1.0"), (dict(eps=float("nan")), "eps is nan"), (dict(lr=None), "lr is None")],
)
def test_scalars_outside_their_range_are_named(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scalars(**fields)


def test_refusals() -> None:
    weight, grad, exp_avg, exp_avg_sq = state((4, 4))
    with pytest.raises(ValueError, match="steps are whole numbers from 1"):
        scalars(0)
    with pytest.raises(ValueError, match="grad is torch.bfloat16"):
        adam_(weight, grad.bfloat16(), exp_avg, exp_avg_sq, scalars())
    with pytest.raises(ValueError, match=r"exp_avg has shape \[4\]"):
        adam_(weight, grad, exp_avg[0], exp_avg_sq, scalars())
    with pytest.raises(ValueError, match="weight of shape .* is not contiguous"):
        adam_(weight.t(), grad, exp_avg, exp_avg_sq, scalars())
    with pytest.raises(ValueError, match="out is torch.float32"):
        adam_(weight, grad, exp_avg, exp_avg_sq, scalars(), torch.empty(4, 4))
