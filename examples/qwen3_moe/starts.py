"""One start of the ranks among several: torchrun's ``--max-restarts`` starts all of them again, and its store remembers the starts before.

A torchrun counts the restarts that its own host has asked for. Over several hosts these numbers need not agree, so the ranks settle a name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_POLL = 0.02
_BEGUN = "tio_megatron/begun"


def restarted_by_torchrun() -> bool:
    """Whether torchrun would start the ranks again."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")


def name_of_start(store: Store, rank: int, size: int, limit: timedelta) -> str:
    """A name for this start that no other has, the same on all its ranks.

    Each rank shows a word of its own; rank 0 answers every word that it sees with the name, and goes on once all have taken it. Words of ranks that
    have ended are answered too, and nobody is there to take it.

    Raises:
        DistStoreError: a rank has not come within ``limit``.
    """
    if not restarted_by_torchrun():
        return "start"
    mine, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    if rank:
        store.set(f"tio_megatron/came/{rank}", mine)
        answer = f"tio_megatron/name/{mine}"
        while not store.check([answer]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError("rank 0 does not answer in torchrun's store")
            time.sleep(_POLL)
        name = store.get(answer).decode()
        store.set(f"tio_megatron/took/{rank}/{mine}/{name}", "1")
        return name
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"tio_megatron/came/{other}"]):
                word = store.get(f"tio_megatron/came/{other}").decode()
                store.set(f"tio_megatron/name/{word}", mine)
                if store.check([f"tio_megatron/took/{other}/{word}/{mine}"]):
                    waiting.discard(other)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"wait timeout, keys: tio_megatron/came/{min(waiting)}")
        time.sleep(_POLL)
    return mine


def begun(store: Store) -> bool:
    """Whether an earlier start of the same torchrun had begun its work: then what lies in the job's folder is this run's own."""
    return restarted_by_torchrun() and bool(store.check([_BEGUN]))


def begin(store: Store) -> None:
    """From here on a restart goes on instead of starting anew."""
    if restarted_by_torchrun():
        store.set(_BEGUN, "1")
