"""The launch script: its options in this process, its environment and its ports as people start it."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from small_disk import small_disk

from examples.qwen3_moe import consistency
from examples.qwen3_moe.main import main
from examples.qwen3_moe.rl import main as rl_main
from tests.bad_input.table import ROOT, Row

PART, START = "options of the job", "starting the job"


def told(status: int, said: str) -> None:
    """A job that ended badly, as an error; it must have said one line and status 2."""
    lines = said.strip().splitlines()
    assert status == 2 and len(lines) == 1 and lines[0].startswith("qwen3_moe: error: "), (status, lines)
    raise ValueError(lines[0])


def options(*words: str, job: Callable[[list[str]], int] = main, **variables: str) -> Callable[[Path], Callable[[], object]]:
    def act(folder: Path) -> Callable[[], object]:
        if not (folder / "file").exists():
            (folder / "file").write_text("")

        def run() -> None:
            with contextlib.redirect_stderr(io.StringIO()) as said, mock.patch.dict(os.environ, variables):
                status = job(list(words))
            told(status, said.getvalue())

        return run

    return act


def started(*words: str, **variables: str) -> Callable[[Path], Callable[[], object]]:
    """``bash launch/qwen3_moe.sh`` in a process of its own."""

    def act(folder: Path) -> Callable[[], object]:
        def run() -> None:
            environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
            done = subprocess.run(
                ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            told(done.returncode, done.stderr)

        return run

    return act


def on_a_full_disk(folder: Path) -> Callable[[], object]:
    def run() -> None:
        with small_disk(folder / "disk", "64k") as root:
            assert root.is_dir()
            act()

    act = options("--out", "disk/out")(folder)
    return run


def port_in_use(folder: Path) -> Callable[[], object]:
    """The first of two hosts, whose port another program has."""

    def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            started("--tp", "2", "--ep", "2", **HOSTS | {"MASTER_PORT": str(server.getsockname()[1])})(folder)()

    return run


def taken(folder: Path) -> Callable[[], object]:
    """The table of training, into a folder that another run has."""
    from examples.qwen3_moe.matrix_train import main as matrix_train
    from tio_megatron.jobs import folders

    (folder / "out").mkdir()

    def run() -> None:
        with folders.claimed(folder / "out"):
            options("--out", "out", job=matrix_train)(folder)()

    (folder / "file").write_text("")
    return run


def check(*words: str, **variables: str) -> Callable[[Path], Callable[[], object]]:
    return options("--layouts", "tp1", *words, job=consistency.main, **variables)


HOSTS = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ROWS = [
    Row(PART, "--trainers tp3", "no cuts serve TP 3 SP: leaves are powers of two, so tp and etp must be powers of two", options("--trainers", "tp3")),
    Row(PART, "--trainers ep32", "16 experts do not divide by ep 32", options("--trainers", "ep32")),
    Row(PART, "--rollouts pp2", "'pp2' is neither tpN nor ep", options("--rollouts", "pp2")),
    Row(PART, "--tp many", "--tp: invalid int value: 'many'", options("--tp", "many")),
    Row(PART, "--lr nan", "--lr: must be a finite number above 0, got nan", options("--lr", "nan")),
    Row(PART, "--temperature 0", "--temperature must be above 0 and finite, at least 1e-05, got 0.0", options("--temperature", "0")),
    Row(PART, "--temperature 1e-6", "at least 1e-05, got 1e-06", options("--temperature", "1e-6")),
    Row(PART, "rl --temperature 1e-6", "at least 1e-05, got 1e-06", options("--tp", "1", "--ep", "1", "--temperature", "1e-6", job=rl_main)),
    Row(PART, "rl --samples 1", "--samples must be at least 2", options("--tp", "1", "--ep", "1", "--samples", "1", job=rl_main)),
    Row(PART, "--model with spaces and other letters, not there", "--model no wäy 名: no such folder", options("--model", "no wäy 名")),
    Row(PART, "--out that is a file", "--out file: is a file, not a folder", options("--out", "file")),
    Row(PART, "--out on a disk that takes no files", "--out /proc/it: /proc cannot be written", options("--out", "/proc/it")),
    Row(PART, "--out on a full disk", "MiB are free; set --out to a folder on a larger disk", on_a_full_disk),
    Row(PART, "matrix_train --out that another run has", "another job is writing there; wait until it has ended", taken),
    Row(PART, "--fp8", "unrecognized arguments: --fp8", options("--fp8")),
    Row(PART, "consistency under TIO_CONTRACT=garbage", "'garbage' is neither 1, default, a JSON object nor a file", check(TIO_CONTRACT="garbage")),
    Row(PART, "consistency under a contract of another vocabulary", "the model of this check has 700", check(TIO_CONTRACT='{"vocab_size": 9}')),
    Row(START, "OMP_NUM_THREADS=abc", "OMP_NUM_THREADS must be a whole number of at least 1, got 'abc'", started(OMP_NUM_THREADS="abc")),
    Row(START, "NPROC_PER_NODE=none", "NPROC_PER_NODE must be a whole number of at least 1, got 'none'", started(NPROC_PER_NODE="none")),
    Row(START, "two hosts without MASTER_PORT", "MASTER_ADDR and MASTER_PORT must name the first host", started("--tp", "2", "--ep", "2", NNODES="2")),
    Row(START, "MASTER_PORT=99999", "port must be 0-65535", started("--tp", "2", "--ep", "2", **HOSTS | {"MASTER_PORT": "99999"})),
    Row(START, "a port that another program has", "Address already in use", port_in_use),
]
