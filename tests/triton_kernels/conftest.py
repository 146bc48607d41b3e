"""Tests of the Triton kernels, in a process of their own: Triton decides at import whether it interprets.

``tests/kernels/test_triton.py`` starts that process with Triton's interpreter; ``benchmarks/gpu_check.py`` runs them on a GPU, where tensors are
made then (``--kernels-on cuda``). In any other process they are not collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tio_megatron.testing import poison

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent

if INTERPRETED:
    from tests.triton_kernels import interpreter

    interpreter.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels-on", choices=("cuda",), help="run the Triton kernels on this device (tests/triton_kernels alone)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kernels-on", None):
        torch.set_default_device(config.getoption("--kernels-on"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    on_device = config.getoption("--kernels-on", None)
    if HERE in collection_path.parents and (not (INTERPRETED or on_device) or on_device and collection_path.name in ("test_layers.py", "test_main_job.py")):
        return True
    return None


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Outputs nobody wrote show as NaN."""
    torch.manual_seed(0)
    with poison():
        yield
