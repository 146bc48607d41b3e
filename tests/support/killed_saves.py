"""Saves that SIGKILL ends at a chosen call to the file system. For tests only.

Run as a program, ``killed_saves.py FOLDER next|same|replaced STRIDE``: its children are forked from a process that has started no threads.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from tio_megatron.checkpoint import Checkpoint, CheckpointConfig, TrainingDraft, damaged_files, latest_training, tensor_digest, tensor_table, training_state
from tio_megatron.checkpoint import write_checkpoint as write
from tio_megatron.testing.qwen3 import MOE

SMALL = MOE | dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64)
SMALL |= dict(num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16)
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree", "fcntl.flock")


def tensors(seed):
    """Random tensors for every name of :data:`SMALL`."""
    generator = torch.Generator().manual_seed(seed)
    for name, spec in tensor_table(CheckpointConfig.from_dict(SMALL).shape).items():
        yield name, torch.randn(spec.shape, generator=generator).bfloat16()


def digests(seed):
    return {name: tensor_digest(tensor) for name, tensor in tensors(seed)}


def whole_state(step):
    """All that a checkpoint's state must have, beside its files."""
    group = dict(
        wd_mult=1.0, lr_mult=1.0, lr=1e-3, weight_decay=0.1, eps=1e-8, betas=[0.9, 0.95], tensors=[], max_lr=None, min_lr=None, start_wd=None, end_wd=None
    )
    return {
        "step": step,
        "position": {},
        "settings": {},
        "contract": {"grain": 32, "cuts": {"hidden": 8}},
        "fingerprint": "0123",
        "kernels": "cpu-1",
        "model": {"layers": 1},
        "training": {"moe_aux_loss_coeff": 0.0},
        "optimizer": {"step": step, "clip_grad": 1.0, "groups": [group]},
        "schedule": {"num_steps": step, "max_lr": 1e-3},
        "largest": {"model.norm.weight": (0.5).hex()},
        "random": {"ranks": [{"torch": "ab"}], "states": {"ab": "text"}},
        "written": {"layout": {"tp": 1}, "versions": {}},
    }


def save(root, step, seed=0):
    """A training checkpoint of two folders."""
    with TrainingDraft(root, step) as draft:
        for number, kind in enumerate(("model", "exp_avg")):
            write(draft.path / kind, SMALL, tensors(seed + 100 * number))
        return draft.commit(whole_state(step) | {"settings": {"seed": seed}})


def check(root, seeds):
    """The newest checkpoint is whole; returns the seed it was made from, one of ``seeds``."""
    folder = latest_training(root)
    state = training_state(folder)
    assert state["settings"]["seed"] in seeds and not damaged_files(folder, state["files"])
    for number, kind in enumerate(("model", "exp_avg")):
        with Checkpoint(folder / kind) as found:
            assert found.digests() == digests(state["settings"]["seed"] + 100 * number)
    return state["settings"]["seed"]


def killed_at(moment, work, *arguments):
    """Call ``work`` in a process that SIGKILL ends before its ``moment``-th call to the file system; True if it was done before."""
    child = os.fork()
    if child == 0:
        calls = 0

        def hook(event, _):
            nonlocal calls
            # fsync has no event, but nothing can be seen between two events.
            if event in EVENTS:
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            signal.alarm(60)
            sys.addaudithook(hook)
            work(*arguments)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the save ended with status {status}"
    return not killed


def training(folder, step, stride):
    """Kill the save of ``step`` after that of step 5, at every ``stride``-th moment: what is found afterwards, each time."""
    save(folder / "before", 5, 1)
    found, moment, done = [], 0, False
    while not done:
        moment += stride
        root = folder / f"killed-{moment}"
        shutil.copytree(folder / "before", root)
        done = killed_at(moment, save, root, step, 2)
        found.append(check(root, {1, 2}))
        # Whatever was left, the next save works and cleans up.
        save(root, 7, 3)
        assert check(root, {3}) == 3 and not list(root.glob(".draft-*"))
        shutil.rmtree(root)
    return moment, found


def replaced(folder, stride):
    """The same for an HF folder that takes the place of another."""
    wanted = {1: digests(1), 2: digests(2)}
    found, moment, done = [], 0, False
    while not done:
        moment += stride
        path = folder / str(moment) / "model"
        write(path, SMALL, tensors(1))
        done = killed_at(moment, write, path, SMALL, tensors(2))
        with Checkpoint(path) as checkpoint:
            found.append(next(seed for seed in wanted if wanted[seed] == checkpoint.digests()))
    return moment, found


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, which, every = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    last, seeds = replaced(place, every) if which == "replaced" else training(place, 5 if which == "same" else 6, every)
    assert seeds == sorted(seeds) and set(seeds) == {1, 2}, f"the old one before some moment, the new one from then on: {seeds}"
    print(f"{len(seeds)} kills, the last at call {last}")
