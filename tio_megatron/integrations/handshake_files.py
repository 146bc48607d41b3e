"""What each worker runs, left as one small JSON file in the folder that ``TIO_HANDSHAKE`` names: ``tio doctor --workers FOLDER`` reads it from outside.

Written when a model is built, before the workers wait for each other, and again whenever somebody asks them (``all_workers``).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tio_megatron.files.whole import write_whole

VARIABLE = "TIO_HANDSHAKE"
SUFFIX = ".worker.json"
FORMAT = 1


def leave(mine: Mapping[str, Any], ranks: Sequence[int]) -> Path | None:
    """Write this worker's answer, whole or not at all. Nothing where the variable is not set.

    Args:
        mine: of :func:`.handshake.record`.
        ranks: global ranks that must answer too, this one included.

    Returns:
        The file.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return None
    job = _job(str(mine["engine"]).partition(" ")[0])
    text = json.dumps({"tio_handshake": FORMAT, "job": job, "time": round(time.time(), 3), "ranks": sorted(ranks), **mine})
    path = Path(folder) / f"{job}-{mine['rank']:05d}{SUFFIX}"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ValueError(f"{VARIABLE}={folder}: cannot be written ({error}); name a folder that every worker can write, or unset it") from error
    return path


def _job(engine: str) -> str:
    """One name for all workers of this engine that share a store, another for every other engine and run: the first worker chooses it."""
    mine = f"{engine}-{uuid.uuid4().hex[:12]}"
    if not dist.is_initialized():
        return _alone.setdefault(engine, mine)
    store, key = dist.distributed_c10d._get_default_store(), f"tio_megatron/handshake/job/{engine}"
    found: bytes = store.compare_set(key, "", mine)
    store.wait([key], timedelta(seconds=30))
    return found.decode()


_alone: dict[str, str] = {}
