"""The NPU's kernels on CPU tensors, with the twins behind the operators' schemas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tio_megatron.kernels import npu_family
from tio_megatron.kernels.npu import stand_in


@pytest.fixture(scope="session", autouse=True)
def _twins() -> None:
    stand_in.install()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=npu_family.ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each package's attention."""
    monkeypatch.setenv(npu_family.VARIABLE, request.param)
    npu_family.route.cache_clear()
    yield request.param
    npu_family.route.cache_clear()
