"""Products whose leaves are programs of their own, as on an NPU: the bytes of those that one program joins."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels.linear import triton as linear
from tio_megatron.testing import assert_same_bytes


@pytest.mark.parametrize("leaves", [2, 4])
@pytest.mark.parametrize("paired", [False, True])
def test_a_leaf_a_program(monkeypatch: pytest.MonkeyPatch, leaves: int, paired: bool) -> None:
    g = torch.Generator().manual_seed(leaves)
    a, b = torch.randn(5, 512, generator=g).bfloat16(), torch.randn(70, 512, generator=g).bfloat16()
    joined = linear.matmul(a, b, leaves, paired, torch.bfloat16)
    monkeypatch.setattr(linear, "NODE", 1)
    assert_same_bytes(linear.matmul(a, b, leaves, paired, torch.bfloat16), joined, "one leaf a program")
    with pytest.raises(AssertionError):
        assert_same_bytes(linear.matmul(a, b, 1, False, torch.float32), linear.matmul(a, b, leaves, paired, torch.float32), "another number of leaves")
