"""Tiles as small as an NPU's compiler takes them: the bytes of large ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tio_megatron.kernels import triton_family
from tio_megatron.kernels.combine import triton as combine
from tio_megatron.kernels.integer_sum import triton as integer_sum
from tio_megatron.kernels.linear import triton as linear
from tio_megatron.kernels.norm import triton as norm
from tio_megatron.kernels.router import triton as router
from tio_megatron.testing import assert_same_bytes


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


IDS = torch.tensor([[0, 3], [1, 2], [2, 7], [5, 6]])


def summed() -> Tensor:
    low, high, peak = torch.zeros(70, 40, dtype=torch.int64), torch.zeros(70, 40, dtype=torch.int64), torch.zeros(1)
    starts, of = torch.tensor([0, 5, 70, 90]), torch.tensor([0, 3])
    integer_sum.add_products([low], [high], [peak], [-45], [40], made(90, 70).bfloat16() * 3, made(90, 40, seed=1).bfloat16(), starts, of, None)
    return torch.cat([low.flatten(), high.flatten(), peak.view(torch.int32).long()])


CASES: dict[str, Callable[[], Tensor]] = {
    "product of 2 leaves": lambda: linear.matmul(made(5, 512).bfloat16(), made(70, 512, seed=1).bfloat16(), 2, False, torch.bfloat16),
    "product of 4 leaves": lambda: linear.matmul(made(5, 512).bfloat16(), made(70, 512, seed=1).bfloat16(), 4, False, torch.float32),
    "product of pairs": lambda: linear.matmul(made(5, 512).bfloat16(), made(70, 512, seed=1).bfloat16(), 4, True, torch.bfloat16),
    "exact sum of products": summed,
    "router": lambda: router.route(made(9, 128), 8, True)[1],
    "scores": lambda: router.scores(made(9, 128)),
    "gradient of the norm": lambda: norm.rms_norm_backward(made(9, 256).bfloat16(), made(9, 256, seed=1).bfloat16(), made(256, seed=2).bfloat16(), 1e-6)[0],
    "combine": lambda: combine.combine(made(8, 40).bfloat16(), torch.arange(8).view(4, 2), IDS, made(4, 2, seed=1), 8, [0], [8]),
}


@pytest.mark.parametrize("case", CASES)
def test_small_tiles_change_no_byte(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    large = CASES[case]()
    monkeypatch.setattr(triton_family, "small", lambda device: True)
    assert_same_bytes(CASES[case](), large, case)


def test_another_number_of_leaves_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        assert_same_bytes(
            *(linear.matmul(made(5, 512).bfloat16(), made(70, 512, seed=1).bfloat16(), leaves, False, torch.float32) for leaves in (1, 4)), "another tree"
        )
