"""Inputs whose sum shows its order, and the reference every schedule is held against."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.contract import ReductionTree


def _adversarial(rank: int, elements: int) -> torch.Tensor:
    """fp32 ``[elements]``: large terms that cancel between ranks, at another pair of ranks from element to element, and signed zeros."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(elements, generator=generator)
    x *= 10.0 ** torch.randint(-3, 4, (elements,), generator=generator)
    place = torch.arange(elements)
    x = torch.where((place + rank) % 5 == 0, torch.tensor(1e20), x)
    x = torch.where((place + rank) % 5 == 2, torch.tensor(-1e20), x)
    return torch.where(place % 11 == 7, torch.tensor(-0.0), x)


@pytest.fixture
def adversarial():
    return _adversarial


@pytest.fixture
def in_one_process():
    """``f(x_of_rank, P)``: the sum by ReductionTree(P) without any rank."""

    def total(make, size: int) -> torch.Tensor:
        return ReductionTree(size).reduce([make(rank) for rank in range(size)])

    return total
