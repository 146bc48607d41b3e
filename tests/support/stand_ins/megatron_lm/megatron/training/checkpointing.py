from pathlib import Path

import torch
from megatron.core import dist_checkpointing


def sharded(model):
    return model[0].module.module.sharded_state_dict()


def save_checkpoint(iteration, model, folder):
    path = Path(folder, f"iter_{iteration:07d}")
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True)
        Path(folder, "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()
    dist_checkpointing.save(sharded(model), str(path))


def load_checkpoint(model, optimizer, folder):
    iteration = int(Path(folder, "latest_checkpointed_iteration.txt").read_text())
    found = dist_checkpointing.load(sharded(model), str(Path(folder, f"iter_{iteration:07d}")))
    model[0].module.module.load_state_dict({name: value for name, value in found.items() if not name.endswith("_extra_state")})
    optimizer.reload_model_params()
    torch.cuda.get_rng_state()
