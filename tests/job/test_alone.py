"""The check of hosts by one process: it writes nothing, and the process that rank 0 starts for comparison ends with rank 0, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import launched

from examples.qwen3_moe.consistency import model
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.testing import assert_same_bytes
from tio_megatron.testing.qwen3 import tiny_weights, write_tiny


def test_weights_in_memory_are_those_of_the_folder(tmp_path):
    held = tiny_weights(model())
    with Checkpoint(write_tiny(tmp_path / "model", model())) as checkpoint:
        for name, spec in checkpoint.table.items():
            assert_same_bytes(held.part(name), checkpoint.part(name), name)
            assert_same_bytes(held.part(name, 0, 1, spec.shape[0]), checkpoint.part(name, 0, 1, spec.shape[0]), f"{name} from row 1")


def _children(process: int) -> list[int]:
    return [int(word) for task in Path(f"/proc/{process}/task").glob("*/children") for word in task.read_text().split()]


def _comparing(process: int) -> int | None:
    """The process below that trains alone, once it runs."""
    for child in _children(process):
        if "consistency import main" in Path(f"/proc/{child}/cmdline").read_bytes().decode():
            return child
        if found := _comparing(child):
            return found
    return None


def test_nothing_is_left_where_rank_0_is_killed_while_it_compares(tmp_path):
    scratch = tmp_path / "temporary"
    scratch.mkdir()
    words = ["bash", launched.JOB, "consistency", "--layouts", "dp2", "--sizes", "--steps", "1"]
    with subprocess.Popen(words, env=launched.environment(tmp_path, TMPDIR=str(scratch)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + 120
            while (alone := _comparing(job.pid)) is None:
                assert time.monotonic() < deadline and job.poll() is None, job.communicate()
                time.sleep(0.05)
            os.kill(int(Path(f"/proc/{alone}/status").read_text().partition("PPid:")[2].split()[0]), signal.SIGKILL)
            _, said = job.communicate(timeout=300)
        finally:
            job.kill()
    assert job.returncode == 137 and "Signal 9 (SIGKILL) received by PID" in said, said
    deadline = time.monotonic() + 20
    while Path(f"/proc/{alone}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{alone}").exists(), "the process that trains alone has outlived rank 0"
    assert not list(scratch.glob("qwen3_moe-*"))
