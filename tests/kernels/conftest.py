"""Every kernel test that takes ``isa`` runs once per instruction set of this processor; the bytes must be those of the reference in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tio_megatron.kernels import library
from tio_megatron.testing import poison


@pytest.fixture(params=library.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.using_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs nobody wrote show as NaN."""
    with poison():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
