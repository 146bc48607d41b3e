"""Rotary embedding: the reference's bytes, tables that do not depend on their length, long positions."""

from __future__ import annotations

from decimal import Decimal, getcontext

import pytest
import torch

from tio_megatron.kernels import rope
from tio_megatron.kernels.rope import reference
from tio_megatron.testing import assert_same_bytes, first_mismatch


@pytest.mark.parametrize("shape, rotated", [((1, 1, 64), 64), ((5, 3, 128), 128), ((4, 2, 48), 20), ((3, 2, 10), 2)])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, shape: tuple[int, int, int], rotated: int) -> None:
    x, table = torch.randn(shape).to(dtype), rope.rope_table(300, rotated, 10000.0)
    positions = torch.randint(0, 300, (shape[0],))
    assert_same_bytes(rope.rope(x, positions, table), reference.rope(x, positions, table))
    assert_same_bytes(rope.rope_backward(x, positions, table), reference.rope(x, positions, table, inverse=True))
    qkv = torch.randn(shape[0], shape[1] + 4, shape[2]).to(dtype)
    assert_same_bytes(rope.rope(qkv[:, 1 : 1 + shape[1]], positions, table), rope.rope(qkv[:, 1 : 1 + shape[1]].contiguous(), positions, table))


def test_the_table_is_a_function_of_the_position() -> None:
    whole = rope.rope_table(9000, 128, 1e6)
    for positions in (1, 37, 4097):
        assert_same_bytes(rope.rope_table(positions, 128, 1e6), whole[:positions])


def test_long_positions_are_right_and_bf16_frequencies_are_not() -> None:
    """Pain 18: at 40000 a frequency kept in bf16 or fp32 gives another angle altogether."""
    table = rope.rope_table(40001, 128, 1e6)
    getcontext().prec = 50
    for position, i in ((40000, 0), (40000, 5), (39999, 63), (12345, 20), (1, 0)):
        angle = Decimal(position) * (Decimal(1000000) ** (Decimal(-2 * i) / 128))
        assert abs(table[position, i].item() - _cos(angle)) < 6.1e-8
    coarse = (1.0 / 1e6 ** (torch.arange(0, 128, 2) / 128)).bfloat16()
    assert (torch.cos(40000 * coarse.float()) - table[40000, :64]).abs().max() > 1
    single = (1.0 / 1e6 ** (torch.arange(0, 128, 2) / 128)).float()
    assert first_mismatch(torch.cos(40000 * single), table[40000, :64])


def _cos(x: Decimal) -> float:
    """Decimal cosine, by reduction and Taylor series."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
    x = x % (2 * pi)
    total, term, n = Decimal(1), Decimal(1), 0
    while abs(term) > Decimal("1e-30") or n < 40:
        n += 2
        term = -term * x * x / (n * (n - 1))
        total += term
    return float(total)


def test_autograd_and_empty() -> None:
    table = rope.rope_table(10, 8, 1e4)
    x, dy, positions = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8), torch.tensor([0, 9, 4])
    assert_same_bytes(torch.autograd.grad(rope.rope(x, positions, table), x, dy)[0], rope.rope_backward(dy, positions, table))
    assert rope.rope(torch.empty(0, 2, 8), torch.empty(0, dtype=torch.int64), table).shape == (0, 2, 8)


def test_refusals() -> None:
    table, x = rope.rope_table(10, 8, 1e4), torch.ones(1, 1, 8)
    for position in (10, -1):
        with pytest.raises(ValueError, match="table has the positions 0 .. 9"):
            rope.rope(x, torch.tensor([position]), table)
    with pytest.raises(ValueError, match="even"):
        rope.rope_table(10, 7, 1e4)
    with pytest.raises(ValueError, match="rotates 8 of 4"):
        rope.rope(torch.ones(1, 1, 4), torch.tensor([0]), table)
