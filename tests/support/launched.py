"""Starts launch/qwen3_moe.sh on hosts as people do: the same command on each, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in its environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import netns_hosts as network
from netns_hosts import Faults, Host

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "launch" / "qwen3_moe.sh")
DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC_PER_NODE", "TIO_CONTRACT", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")

Ended = tuple[int, str, str]
"""Exit status, stdout, stderr."""


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The caller's, without what a launcher may have left in it."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return kept | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TIO_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    """Of this machine, so very likely of a fresh namespace."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(hosts: Sequence[Host], folder: Path, words: Sequence[str], **more: str) -> list[subprocess.Popen[str]]:
    """The launch script on each of ``hosts``, which are numbered in their order."""
    port, processes = str(free_port()), []
    for number, host in enumerate(hosts):
        where = {"NNODES": str(len(hosts)), "NODE_RANK": str(number), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
        processes.append(host.start(["bash", JOB, *words], environment(folder, **where, **more), folder))
    return processes


def run(
    count: int, folder: Path, words: Sequence[str], *, faults: Faults | None = None, backwards: bool = False, seconds: float = 240, **more: str
) -> list[Ended]:
    """The launch script on ``count`` hosts until it has ended on each. ``backwards``: the last host is number 0. No process outlives the job."""
    with network.hosts(count, faults) as made:
        found = []
        for process in start(made[::-1] if backwards else made, folder, words, **more):
            out, err = process.communicate(timeout=seconds)
            found.append((process.returncode, out, err))
        left = [number for host in made for number in host.processes()]
        assert not left, "no process outlives the job"
        return found


def ranks_on(host: Host) -> dict[int, int]:
    """The processes of the job's ranks on a host, by rank."""
    found = {}
    for number in host.processes():
        try:
            held = dict(item.partition("=")[::2] for item in Path(f"/proc/{number}/environ").read_text(errors="replace").split("\0") if item)
        except OSError:  # it has just ended
            continue
        if "RANK" in held:
            found[int(held["RANK"])] = number
    return found


def launcher_on(host: Host) -> int:
    """The process of the launch script."""
    found = []
    for number in host.processes():
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        named = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        if b"python" in words[0] and JOB.encode() in words and not any(variable.startswith(b"RANK=") for variable in named):
            found.append(number)
    (launcher,) = found
    return launcher
