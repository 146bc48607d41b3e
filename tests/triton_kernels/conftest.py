"""Tests of the Triton kernels by Triton's interpreter: a process of its own, since Triton decides at import whether it interprets.

``tests/kernels/test_triton.py`` starts that process; `make test-triton` does the same by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import interpreter
    import torch

    from tio_megatron.testing import poison

    interpreter.install()

    @pytest.fixture(autouse=True)
    def _poisoned() -> Iterator[None]:
        """Outputs nobody wrote show as NaN."""
        torch.manual_seed(0)
        with poison():
            yield
