"""The check of hosts by one process: it writes nothing, and the process that rank 0 starts for comparison ends with rank 0, however that ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import launched

from examples.qwen3_moe.consistency_options import model
from tio_megatron.checkpoint import Checkpoint
from tio_megatron.testing import assert_same_bytes
from tio_megatron.testing.qwen3 import tiny_weights, write_tiny

ROOT = Path(__file__).resolve().parents[2]


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
        if "consistency.main" in Path(f"/proc/{child}/cmdline").read_bytes().decode():
            return child
        if found := _comparing(child):
            return found
    return None


def test_nothing_is_left_where_rank_0_is_killed_while_it_compares(tmp_path):
    scratch = tmp_path / "temporary"
    before = scratch / "tio-torchrun-of_a_start_that_was_killed"
    before.mkdir(parents=True)
    os.utime(before, (1, 1))
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
    assert (job.returncode, said) == (137, "qwen3_moe: rank 0 was ended by SIGKILL (out of memory?)\n")
    deadline = time.monotonic() + 20
    while Path(f"/proc/{alone}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{alone}").exists(), "the process that trains alone has outlived rank 0"
    assert not list(scratch.glob("tio-*"))


def test_a_rank_whose_launcher_was_killed_before_it_could_ask_does_not_run(tmp_path):
    """It starts for seconds, and asks Linux to end it with its parent only then; it knows by the launcher's number that its parent is another by now."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launched.free_port())}
    command = [sys.executable, "-W", "ignore", launched.JOB, "consistency", "--layouts", "dp1", "--soak", "1"]

    def rank(launcher: int) -> subprocess.CompletedProcess[str]:
        environment = launched.environment(tmp_path, **alone, QWEN3_MOE_LAUNCHER=str(launcher))
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    orphan = rank(ended.pid)
    assert orphan.returncode == 1 and not orphan.stdout, orphan
    assert rank(os.getpid()).returncode == 0, "the control: its parent is its launcher"


def test_a_rank_whose_store_says_nothing_ends_within_its_limit(tmp_path):
    """The process that keeps the store is stopped: its kernel takes the connection, and torch waits for its word for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = launched.environment(tmp_path, **where, MASTER_PORT=str(silent.getsockname()[1]), TIO_COLLECTIVE_SECONDS="4")
        command = [sys.executable, "-W", "ignore", launched.JOB, "consistency", "--layouts", "dp2", "--soak", "1"]
        ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and not ended.stdout, ended
    assert "the ranks cannot come together: the store at 127.0.0.1:" in ended.stderr and len(ended.stderr.splitlines()) == 1, ended
