"""The main job over the Triton kernels, interpreted, on a device made in Python: megatron-core under the contract as trainer, the rollout over pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import main_job
from benchmarks.gpu_check import SMALL_MODEL
from examples.qwen3_moe import makers
from tests.support import strict_device
from tio_megatron.testing import run_ranks


@pytest.mark.full
def test_megatron_trains_by_these_kernels(tmp_path: Path) -> None:
    """Rollout, scoring and a step of Adam: no log-probability differs, and no weight between TP 1 and TP 2 EP 2 with sequence parallelism."""
    makers.make_random(tmp_path, makers.slice_config(1, experts=4, vocab=128) | SMALL_MODEL, 1)
    work = main_job.Work(tmp_path, strict_device.DEVICE, "triton-sm90", rounds=1, samples=2, prompt=5, new=2)
    found = [run_ranks(n, strict_device.job, "triton", work, layout, timeout=600, start="spawn")[0] for n, layout in ((1, "tp1"), (2, "tp2+ep2+sp"))]
    for rounds, digests, calls in found:
        assert rounds[0].logdiff == (11, 0, 0.0)
        assert digests == found[0][1] and len(digests) == 24
        wanted = {"attention", "attention_backward", "attention_paged", "grouped", "matmul", "add_products", "add_rows", "add_norm_terms"}
        wanted |= {"sum_value", "add_squares_", "scale_", "adam_"}
        assert wanted <= set(calls), wanted - set(calls)
