"""Runs a function as the ranks of a gloo world: real processes on this machine, one thread each."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 0.3
"""Seconds given to the other ranks, once one has failed, to say that they failed earlier."""


class RankError(RuntimeError):
    """A rank failed. ``rank`` is the first that did; the message holds its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, start: str = "fork") -> list[Any]:
    """``fn(rank, *args)`` in ``n`` processes joined by gloo; returns what each returned, by rank.

    The default process group is ready when ``fn`` starts, also for ``n`` = 1. The first failure ends all other ranks.

    Args:
        n: ranks.
        fn: called as ``fn(rank, *args)``. With ``start="fork"`` it may be any function, nested ones included; with ``"spawn"`` it and
            ``args`` must pickle. What it returns must pickle.
        timeout: seconds for everything, start-up included.
        start: ``"fork"`` (quick) or ``"spawn"`` (a clean interpreter: for code that starts threads or sets process-wide state on import).

    Raises:
        RankError: a rank raised or died; holds that rank's traceback or exit status.
        TimeoutError: some ranks were not done in time; holds the stack of each.
        ValueError: ``n`` is less than 1, or ``start`` is unknown.
    """
    if n < 1:
        raise ValueError(f"run_ranks: n must be at least 1, got {n}")
    if start not in ("fork", "spawn"):
        raise ValueError(f"run_ranks: start must be 'fork' or 'spawn', got {start!r}")
    context: Any = multiprocessing.get_context(start)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="tio-ranks-") as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(n):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, n, folder, timeout, sender, fn, args), name=f"rank {rank}", daemon=False)
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            results = _collect(processes, pipes, deadline, timeout, Path(folder))
            for process in processes:
                process.join(timeout=5)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(processes: list[BaseProcess], pipes: list[Connection], deadline: float, timeout: float, folder: Path) -> list[Any]:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    failures: list[tuple[float, int, str]] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break
            raise TimeoutError(_timeout_message(processes, sorted(waiting.values()), timeout, folder))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                when, failed, payload = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                # A rank that died without a word is the cause of what the others report, so it sorts first.
                when, failed, payload = 0.0, True, f"died without a traceback, exit status {processes[rank].exitcode}"
            if failed:
                if not failures:
                    deadline = min(deadline, time.monotonic() + _GRACE)
                failures.append((when, rank, payload))
            else:
                results[rank] = payload
    if failures:
        _, rank, text = min(failures)
        raise RankError(rank, f"rank {rank} of {len(pipes)} failed:\n{text}")
    return results


def _timeout_message(processes: list[BaseProcess], late: list[int], timeout: float, folder: Path) -> str:
    for rank in late:
        pid = processes[rank].pid
        if processes[rank].is_alive() and pid is not None and (folder / f"stack.{rank}").exists():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    lines = [f"ranks {late} of {len(processes)} were not done in {timeout:g} s"]
    for rank in late:
        stack = folder / f"stack.{rank}"
        lines.append(f"rank {rank}:\n" + (stack.read_text() if stack.exists() else "  not started"))
    return "\n".join(lines)


def _rank_main(rank: int, n: int, folder: str, timeout: float, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    stack = open(Path(folder) / f"stack.{rank}", "w")  # noqa: SIM115  (held open for the signal handler)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        torch.set_num_threads(1)
        if Path("/sys/class/net/lo").exists():
            # The host's name may not resolve, or to an address nobody routes; all ranks are on this machine.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
        result = fn(rank, *args)
        if dist.is_initialized():
            # Nobody may close a connection that a slower rank still reads.
            dist.barrier()
            dist.destroy_process_group()
        message = pickle.dumps((time.monotonic(), False, result))
    except BaseException:  # noqa: BLE001  (also SystemExit and KeyboardInterrupt: the parent raises it again)
        message = pickle.dumps((time.monotonic(), True, traceback.format_exc()))
    pipe.send_bytes(message)
    pipe.close()
