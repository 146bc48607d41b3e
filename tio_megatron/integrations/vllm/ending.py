"""How an engine of several processes ends: a worker that was killed is named, and no file that vLLM made for the engine outlives it."""

from __future__ import annotations

import contextlib
import functools
import os
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
    except RuntimeError as error:
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
    """An engine that is started in this block leaves neither sockets nor shared memory behind, however it ends later.

    vLLM makes files by which the processes of an engine find each other, and removes some of them when the engine ends well. Once an engine has
    started, its processes hold open what they need, so the names can go. For engines whose environment vLLM has not read before.

    >>> with leaving_no_files():
    ...     folder = os.environ["VLLM_RPC_BASE_PATH"]
    >>> os.path.exists(folder)
    False
    """
    before = tempfile.tempdir, os.environ.get(_SOCKETS)
    # A socket's path has at most 107 bytes, which a folder inside a long TMPDIR would pass.
    with tempfile.TemporaryDirectory(prefix="tio-vllm-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        tempfile.tempdir = os.environ[_SOCKETS] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before[0]
            os.environ.pop(_SOCKETS)
            if before[1] is not None:
                os.environ[_SOCKETS] = before[1]
            # The shared memory of the ranks bears the name of the file in which they met.
            for meeting in Path(folder).glob("vllm_dist_*"):
                for memory in _SHARED_MEMORY.glob(f"{meeting.name}-*"):
                    memory.unlink(missing_ok=True)
