"""How an engine of several processes ends: a worker that was killed is named, and the files that vLLM made for the engine go with its owner."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")
_SOCKETS = "VLLM_RPC_BASE_PATH"


def remember_killed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``MultiprocExecutor.shutdown``: vLLM calls it when a worker has died, and then ends the others, by signals too."""

    @functools.wraps(stock)
    def shutdown(self: Any) -> None:
        if not hasattr(self, "tio_killed"):
            self.tio_killed = _killed(self)
        stock(self)

    return shutdown


@contextlib.contextmanager
def naming_the_killed(executor: Any) -> Iterator[None]:
    """Around whatever waits for workers: vLLM says ``cancelled``, or what a survivor says of a connection.

    Raises:
        RuntimeError: the call failed, and a worker was ended by a signal: names the worker and the signal.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        killed = getattr(executor, "tio_killed", None) or _killed(executor)
        if not killed:
            raise
        raise RuntimeError(f"{'; '.join(killed)}; the engine has ended") from error


def _killed(executor: Any) -> list[str]:
    return [
        f"vLLM's worker of rank {worker.rank} (process {worker.proc.pid}) was ended by {signal.Signals(-status).name}"
        for worker in getattr(executor, "workers", None) or ()
        if (status := worker.proc.exitcode) is not None and status < 0
    ]


@contextlib.contextmanager
def leaving_no_files() -> Iterator[None]:
    """The files of an engine that is started in this block are removed when this process ends, by an error too: sockets and shared memory.

    vLLM makes files by which the processes of an engine find each other, and removes some of them when the engine ends well. A process that is
    ended by SIGKILL removes nothing. For engines whose environment vLLM has not read before.

    >>> with leaving_no_files():
    ...     os.path.exists(os.environ["VLLM_RPC_BASE_PATH"])
    True
    """
    before = tempfile.tempdir, os.environ.get(_SOCKETS)
    # A socket's path has at most 107 bytes, which a folder inside a long TMPDIR would pass.
    folder = tempfile.mkdtemp(prefix="tio-vllm-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
    _folders[Path(folder)] = os.getpid()
    tempfile.tempdir = os.environ[_SOCKETS] = folder
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop(_SOCKETS)
        if before[1] is not None:
            os.environ[_SOCKETS] = before[1]


_folders: dict[Path, int] = {}
"""Folders of this process's engines, and the process that made each: a child that was forked removes nothing."""


@atexit.register
def remove_files() -> None:
    """Remove the files of the engines that were started in :func:`leaving_no_files`. For a process that ends without its exit functions."""
    for folder in [folder for folder, owner in _folders.items() if owner == os.getpid()]:
        # The shared memory of the ranks bears the name of the file in which they met.
        for meeting in folder.glob("vllm_dist_*"):
            for memory in _SHARED_MEMORY.glob(f"{meeting.name}-*"):
                memory.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        del _folders[folder]
