"""A training step of the family without an NPU, in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: it has no build for this processor")
def test_a_layer_trains_on_the_twins() -> None:
    """Forward, backward and exact sums by the kernels registered for an NPU; the sums have the definition's bytes."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.support.npu_training"], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "sums of one layer have the bytes of the definition" in done.stdout
