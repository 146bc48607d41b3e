"""Rollouts of a real run of reinforcement learning, kept and scored again: the stored bytes, in every layout and engine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tio_megatron.rollouts import Store

ROOT = Path(__file__).resolve().parents[2]
RUN = ("--num-layers", "2", "--pretrain-steps", "1", "--warm-steps", "16", "--prompts", "4", "--samples", "4", "--steps", "2", "--keep-rollouts")


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TIO_CONTRACT", "OMP_NUM_THREADS")}
    return kept | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TIO_CACHE": str(folder / "cache")}


def rl(folder: Path, *argv: str) -> str:
    command = ["bash", str(ROOT / "launch" / "qwen3_moe.sh"), "rl", *RUN, *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=900)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def replay(folder: Path, *argv: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tio_megatron", "rollouts", "replay", *argv], capture_output=True, text=True, env=environment(folder), timeout=600
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_stored_rollouts_have_the_same_bytes_in_every_layout(tmp_path):
    assert rl(tmp_path, "--save-every", "1", "--out", "run").startswith("on policy in 2 of 2 steps")
    store = Store.open(tmp_path / "run" / "rollouts")
    first, second = store
    assert [batch.about.step for batch in store] == [1, 2] and first.about.weights != second.about.weights and len(first) == 16
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["weights"] for step in metrics] == [first.about.weights, second.about.weights]
    (start,) = (tmp_path / "cache").glob("rl-sort-*")
    where = str(store.folder)
    tokens = len(first.logprobs)
    for side in ("megatron tp1", "megatron tp2+ep2", "megatron pp2", "vllm tp1", "vllm tp2+ep"):
        assert replay(tmp_path, where, str(start), side) == (0, f"{tokens} tokens of 1 batches scored again by {side}: the stored bytes")
    status, said = replay(tmp_path, where, str(start), "stock megatron tp1")
    assert status == 1 and re.search(r"\d+ differ, max 0\.\d+", said), "the control: another order shows"
    # a later step, by the weights that the checkpoint of the step before holds
    (later,) = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("step-00000001")]
    weights = later / "model"
    assert replay(tmp_path, where, str(weights), "megatron cp2") == (
        0,
        f"{len(second.logprobs)} tokens of 1 batches scored again by megatron cp2: the stored bytes",
    )
    status, said = replay(tmp_path, where, str(weights), "megatron tp1", "--batch", "0")
    assert status == 2 and "was sampled by" in said
    # a restart samples the same, another run is not mixed into the store
    noted = store.head
    assert rl(tmp_path, "--save-every", "1", "--out", "run", "--resume", "--steps", "3", "--tp", "1", "--ep", "1").startswith("on policy in 3 of 3 steps")
    grown = Store.open(store.folder)
    assert grown.batches == 3 and grown.verify(noted).batches == 3
    assert "holds the rollouts of another run" in rl(tmp_path, "--out", "run")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_at_another_temperature(tmp_path):
    assert rl(tmp_path, "--temperature", "0.8", "--steps", "1", "--out", "run").startswith("on policy in 1 of 1 steps")
    (start,) = (tmp_path / "cache").glob("rl-sort-*")
    where = str(tmp_path / "run" / "rollouts")
    assert replay(tmp_path, where, str(start), "megatron tp2")[0] == 0
    status, said = replay(tmp_path, where, str(start), "vllm tp1")
    assert status == 2 and "at temperature 1 alone, 0.8 was asked for" in said
