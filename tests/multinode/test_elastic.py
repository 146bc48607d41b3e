"""torchrun's elastic restart: ranks are killed in a step and in the middle of a save, and the run ends with the bytes of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import free_port

from tio_megatron.checkpoint import damaged_files, latest_training, training_state
from tio_megatron.testing.qwen3 import MOE, write_tiny

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(ROOT / "tests" / "support" / "elastic_ranks.py")
SMALL = MOE | dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=32, vocab_size=300)
SMALL |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def run(folder, name, kills, steps=3):
    """(what rank 0 printed, the digest, the files of the last checkpoint) of a run over two ranks that torchrun restarts after each kill."""
    model, root = folder / "model", folder / name
    if not model.exists():
        write_tiny(model, SMALL)
    settings = {"model": str(model), "root": str(root), "steps": steps, "layout": "tp2+ep2", "kills": kills}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += ["--max-restarts", str(len(kills)), RANKS, json.dumps(settings)]
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT")}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TIO_COLLECTIVE_SECONDS": "10"}
    done = subprocess.run(command, env=kept, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    last = latest_training(root)
    state = training_state(last)
    assert state["step"] == steps and not damaged_files(last, state["files"]) and not list(root.glob(".draft-*"))
    lines = done.stdout.splitlines()
    (digest,) = [line.split()[1] for line in lines if line.startswith("digest ")]
    return [line for line in lines if line.startswith("start ")], digest, state["files"]


@pytest.mark.full
def test_killed_in_a_step_and_in_a_save(tmp_path):
    _, wanted, files = run(tmp_path, "undisturbed", [])
    starts, digest, found = run(tmp_path, "killed", [{"rank": 1, "step": 1}, {"rank": 0, "step": 2, "save": 30}])
    assert starts == ["start 0 from step 0", "start 1 from step 1", "start 2 from step 1"]
    assert digest == wanted and found == files
    # The control: another number of steps is another digest.
    assert run(tmp_path, "shorter", [], steps=2)[1] != wanted


@pytest.mark.full
@pytest.mark.parametrize("rank, save", [(0, 1), (0, 12), (0, 55), (1, 1), (1, 3), (1, 6)])  # rank 0 writes, and looks 58 times; the other 6 times
def test_killed_in_other_moments_of_a_save(rank, save, tmp_path):
    _, wanted, files = run(tmp_path, "undisturbed", [])
    starts, digest, found = run(tmp_path, "killed", [{"rank": rank, "step": 2, "save": save}])
    assert len(starts) == 2, "killed once; else that save has fewer moments now"
    assert starts[1] in ("start 1 from step 1", "start 1 from step 2")
    assert digest == wanted and found == files
