"""Inputs whose sum shows its order, and the sum in one process that every schedule is held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from tio_megatron.contract import ReductionTree

_MOST = 1 << 16


@lru_cache(maxsize=16)
def _whole(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(_MOST, generator=generator)
    x *= 10.0 ** torch.randint(-3, 4, (_MOST,), generator=generator)
    place = torch.arange(_MOST)
    x = torch.where((place + rank) % 5 == 0, torch.tensor(1e20), x)
    x = torch.where((place + rank) % 5 == 2, torch.tensor(-1e20), x)
    return torch.where(place % 11 == 7, torch.tensor(-0.0), x)


@pytest.fixture(scope="session")
def term() -> Callable[..., torch.Tensor]:
    """``term(rank, *shape)``: what a rank adds. Large terms cancel between ranks, at other ranks from element to element; some are -0 on
    every rank. Element i is the same number whatever the shape."""

    for rank in range(12):
        _whole(rank)  # once, before ranks are forked

    def make(rank: int, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        assert count <= _MOST
        return _whole(rank)[:count].reshape(shape).clone()

    return make


@pytest.fixture(scope="session")
def total(term) -> Callable[..., torch.Tensor]:
    """``total(P, *shape)``: the sum of ``term`` over P ranks by the tree, in one process."""

    def make(size: int, *shape: int) -> torch.Tensor:
        return ReductionTree(size).reduce([term(rank, *shape) for rank in range(size)])

    return make
