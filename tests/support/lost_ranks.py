"""One rank of a world over several hosts that moves bytes until somebody is missing, and writes down what it was told.

torchrun ... lost_ranks.py FOLDER: ``ready-RANK`` (its process) once all collectives have worked, then ``lost-RANK`` (JSON: the error, who is missing).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from examples.qwen3_moe.world import join  # noqa: E402
from tio_megatron import collectives  # noqa: E402


def main(folder: Path) -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = torch.ones(size * 100)
    try:
        for turn in range(10**9):
            for schedule in ("doubling", "scatter", "ring"):
                collectives.all_reduce(x, group, schedule=schedule)
            collectives.all_to_all(collectives.all_gather(collectives.reduce_scatter(x, group), group), None, None, group)
            if turn == 0:
                (folder / f"ready-{rank}").write_text(str(os.getpid()))
    except collectives.CollectiveError as error:
        (folder / f".lost-{rank}").write_text(json.dumps({"text": str(error), "missing": error.missing, "at": time.time()}))
        (folder / f".lost-{rank}").rename(folder / f"lost-{rank}")
    time.sleep(5)  # torchrun ends the others of this host as soon as one has left; they have something to say


if __name__ == "__main__":
    torch.set_num_threads(1)
    join(timedelta(seconds=60))
    main(Path(sys.argv[1]))
    os._exit(1)
