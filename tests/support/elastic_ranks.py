"""One rank of a training that torchrun restarts: it saves after every step, resumes from the newest checkpoint, and is killed as it was told.

torchrun --max-restarts 2 ... elastic_ranks.py '{"model": ..., "root": ..., "steps": 4, "kills": [{"rank": 1, "step": 1}, {"rank": 0, "step": 2, "save": 9}]}'

Each kill is of one start, in order: at the beginning of that step, or at that many looks of its save at the file system. Rank 0 prints the digest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

from examples.qwen3_moe.training import Recipe, Training, parse  # noqa: E402
from tio_megatron.contract import Contract  # noqa: E402


def dies(kills: list[dict], start: int, step: int, saving: bool) -> int:
    """0 for not now, else at the how-manieth event."""
    kill = kills[start] if start < len(kills) else {}
    now = kill.get("rank") == dist.get_rank() and kill.get("step") == step and ("save" in kill) == saving
    return int(kill.get("save", 1)) if now else 0


def main(settings: dict) -> str:
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    root, moment, count = Path(settings["root"]), 0, 0

    def look(event: str, _: object) -> None:
        nonlocal count
        if moment and event in ("open", "os.rename", "os.mkdir"):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    recipe = Recipe(Path(settings["model"]), steps=settings["steps"], warmup=2, samples=4, longest=48, shortest=16)
    run = Training(recipe, parse(settings["layout"]), Contract(grain=32))
    if any(root.glob("step-*")):
        run.resume(root)
    if dist.get_rank() == 0:
        print(f"start {start} from step {run.step_number}", flush=True)
    while run.step_number < recipe.steps:
        if dies(settings["kills"], start, run.step_number, False):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
        moment = dies(settings["kills"], start, run.step_number, True)
        run.save(root)
        moment = 0
    made = run.sha256()
    run.close()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    from tio_megatron.jobs.ranks import come_together

    come_together()
    answer = main(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(f"digest {answer}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
