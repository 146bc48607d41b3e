"""The connections to the store that brought the ranks together: where it is, whether it has ended, and that nobody waits for it for ever. Moves no tensor.

torch's store has a limit for what it is asked to wait for, but none for an answer: a process whose cable is pulled while it asks would wait until the
cable is back, deaf to signals. The system can keep that limit, on the connection itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_KNOCKING_SECONDS = 0.5


def address(store: Store) -> tuple[str, int] | None:
    """Host and port of a TCP store, also below prefixes; None for another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def ended(place: tuple[str, int] | None) -> bool:
    """Whether the machine at ``place`` says that nobody listens there any more; False where it says nothing, as one that is cut off does."""
    if place is None:
        return False
    try:
        socket.create_connection(place, timeout=_KNOCKING_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def limit(port: int, seconds: float) -> int:
    """From now on this process's connections to ``port`` of any host are lost when the other side's system has said nothing for ``seconds``.

    A side that only takes its time is asked by the system itself, and keeps the connection.

    Returns:
        How many connections there are.
    """
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as held:  # a second name of the same socket
                if held.type != socket.SOCK_STREAM or held.family not in (socket.AF_INET, socket.AF_INET6) or held.getpeername()[1] != port:
                    continue
                _set(held, seconds)
                found += 1
        except OSError:  # it has just been closed, or is not connected
            continue
    return found


def _set(held: socket.socket, seconds: float) -> None:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        held.setsockopt(socket.IPPROTO_TCP, option, max(1, min(60, int(seconds / 8))))
    with contextlib.suppress(OverflowError):  # months: no limit, then
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
