"""Disks, and the other kinds of files."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import file_readers
import pytest
from killed_saves import SMALL, save, tensors
from rollout_batches import batch
from small_disk import no_look_ahead, small_disk

from tests.bad_input.table import Row
from tio_megatron.checkpoint import training_state, write_checkpoint
from tio_megatron.rollouts import Store
from tio_megatron.traces.writer import FORMAT
from tio_megatron.verify import Recording

DISKS, FILES = "disks", "other files"
Work = Callable[[Path], object]


def write_model(root: Path) -> object:
    return write_checkpoint(root / "m", SMALL, tensors(1))


def save_training(root: Path) -> object:
    return save(root / "t", 7)


def append_rollouts(root: Path) -> object:
    return Store.open(root / "s").append(batch(1, sequences=4000))


def create_store(root: Path) -> object:
    return Store.create(root / "new")


def record(root: Path) -> object:
    return Recording.of([[1] * 20000], [1], [[-1.0] * 19999], None).save(root / "r.npz")


def full(work: Work, before: Work = lambda root: None) -> Callable[[Path], Callable[[], object]]:
    """``work`` on a disk of 16 KiB that nobody has looked at before."""

    def act(folder: Path) -> Callable[[], object]:
        def run() -> None:
            with pytest.MonkeyPatch.context() as patch, small_disk(folder / "disk", "16k") as root:
                no_look_ahead(patch)
                before(root)
                there = sorted(path.name for path in root.rglob("*"))
                try:
                    work(root)
                finally:
                    assert [name for name in sorted(path.name for path in root.rglob("*")) if name not in (*there, ".lock", "t")] == []

        return run

    return act


def read_only(work: Work, before: Work = lambda root: None) -> Callable[[Path], Callable[[], object]]:
    """``work`` on a disk that was made read-only."""

    def act(folder: Path) -> Callable[[], object]:
        def run() -> None:
            with contextlib.ExitStack() as stack:
                no_look_ahead(stack.enter_context(pytest.MonkeyPatch.context()))
                root = stack.enter_context(small_disk(folder / "disk", "1m"))
                before(root)
                subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
                work(root)

        return run

    return act


def damaged(name: str, text: str) -> Callable[[Path], Callable[[], object]]:
    """A valid file of a kind, replaced by ``text``."""
    reader = next(reader for reader in file_readers.READERS if reader.name == name)

    def act(folder: Path) -> Callable[[], object]:
        reader.make(folder)
        (folder / reader.files[0]).write_text(text)
        return lambda: reader.read(folder)

    return act


def negative_square(folder: Path) -> Callable[[], object]:
    from tio_megatron.checkpoint import Checkpoint

    write_checkpoint(folder / "exp_avg_sq", SMALL | {"torch_dtype": "float32"}, ((name, -tensor.float().abs()) for name, tensor in tensors(1)))

    def act() -> None:
        with Checkpoint(folder / "exp_avg_sq") as found:
            found.require_values(least=0.0)

    return act


def elsewhere(folder: Path) -> Callable[[], object]:
    """A state that lists a file outside its folder, signed."""
    path = save(folder / "t", 5) / "state.json"
    state = json.loads(path.read_text())
    state["files"]["../../x"] = state["files"].pop("model/config.json")
    path.write_text(json.dumps(state))
    file_readers._seal_training(folder)
    return lambda: training_state(path.parent)


ROWS = [
    Row(DISKS, "a full disk under a checkpoint", "m: cannot be written", full(write_model)),
    Row(DISKS, "a full disk under a training checkpoint", "cannot be written (", full(save_training)),
    Row(DISKS, "a full disk under a store of rollouts", "the 0 batches before are as they were", full(append_rollouts, lambda root: Store.create(root / "s"))),
    Row(DISKS, "a full disk under a recording", "r.npz", full(record)),
    Row(DISKS, "a read-only disk under a checkpoint", "m: cannot be written", read_only(write_model)),
    Row(DISKS, "a read-only disk under a training checkpoint", "t: cannot be written", read_only(save_training)),
    Row(DISKS, "a read-only disk under a new store", "new: cannot be written", read_only(create_store)),
    Row(DISKS, "a read-only disk under a store", "s: cannot be written", read_only(append_rollouts, lambda root: Store.create(root / "s"))),
    Row(DISKS, "a read-only disk under a recording", "r.npz", read_only(record)),
    Row(FILES, "a training checkpoint that lists ../../x", "files names '../../x', which cannot be", elsewhere),
    Row(FILES, "a training checkpoint with a negative second moment", "no value of it can be below 0", negative_square),
    Row(FILES, "a training checkpoint whose state is cut off", "the file is truncated or altered", damaged("training checkpoint", '{"format": "tio')),
    Row(
        FILES,
        "a contract with a cut that is no power of two",
        "contract: cuts.attn_row must be a power of two, got 3",
        damaged("contract", '{"cuts": {"attn_row": 3}}'),
    ),
    Row(FILES, "a contract with an unknown field", "contract: unknown field speed; known are", damaged("contract", '{"speed": 9}')),
    Row(FILES, "a contract that is no JSON", "contract: not JSON", damaged("contract", "{")),
    Row(FILES, "a trace of a later version", "this package reads version", damaged("trace", json.dumps({"format": FORMAT, "version": 99}))),
    Row(
        FILES,
        "a recording with a log-probability of +3",
        "no logarithm of a probability",
        damaged("recording, jsonl", '{"tokens": [1, 2], "logprobs": [3.0]}\n'),
    ),
    Row(FILES, "a recording with a text for a token", "'tokens'[0] is 'x', no token id", damaged("recording, jsonl", '{"tokens": ["x"], "logprobs": []}\n')),
    Row(FILES, "a recording cut off in a line", "the file is cut off in the middle of it", damaged("recording, jsonl", '{"tokens": [1')),
    Row(
        FILES,
        "verl's dump without log-probabilities",
        "which holds text and scores but no log-probabilities",
        damaged("recording, verl", '{"input": "a", "output": "b", "score": 1}\n'),
    ),
    Row(
        FILES,
        "a table with an unknown engine",
        "'sglang' is none of megatron, vllm, hf",
        damaged("table of layouts", "model: m\ntrainers: [sglang]\nrollouts: [hf]\n"),
    ),
    Row(
        FILES,
        "a table that asks YAML for a Python object",
        "cannot be read as YAML",
        damaged("table of layouts", "model: !!python/object/apply:os.system [ls]\n"),
    ),
    Row(FILES, "metrics of a run with a line that is none", "metrics.jsonl, line 1: no JSON", damaged("metrics", "{\n")),
]
