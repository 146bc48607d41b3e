"""Folders of training checkpoints: whole or not there, whoever is killed, and every damage named."""

import json
import os
import re
import subprocess
import sys

import killed_saves
import pytest
from killed_saves import SMALL, check, digests, save, tensors
from small_disk import no_look_ahead, small_disk

from tio_megatron.checkpoint import Checkpoint, CheckpointError, TrainingDraft, damaged_files, latest_training, training_state, write_checkpoint


def test_the_newest_is_found_and_its_bytes_are_those_given(tmp_path):
    first = save(tmp_path, 5, seed=10)
    second = save(tmp_path, 10, seed=20)
    assert (first.name, second.name) == ("step-00000005", "step-00000010")
    assert latest_training(tmp_path) == second and latest_training(first) == first
    assert check(tmp_path, {20}) == 20
    assert not damaged_files(first, training_state(first)["files"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", first.name, second.name]


def test_the_same_checkpoint_has_the_same_files(tmp_path):
    one, two = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    files = training_state(one)["files"]
    assert set(files) == {f"{kind}/{name}" for kind in ("model", "exp_avg") for name in ("config.json", "model.safetensors")}
    assert (one / "state.json").read_bytes() == (two / "state.json").read_bytes()


def test_a_step_written_twice_replaces_the_first(tmp_path):
    save(tmp_path, 5, seed=1)
    assert save(tmp_path, 5, seed=2).name == "step-00000005.1"
    assert check(tmp_path, {2}) == 2
    assert save(tmp_path, 5, seed=3).name == "step-00000005"
    assert check(tmp_path, {3}) == 3
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_without_a_commit_nothing_stays(tmp_path):
    save(tmp_path, 5, seed=1)
    with pytest.raises(KeyboardInterrupt), TrainingDraft(tmp_path, 6) as draft:
        write_checkpoint(draft.path / "model", SMALL, tensors(0))
        raise KeyboardInterrupt
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-00000005"]
    assert check(tmp_path, {1}) == 1


def test_two_writers(tmp_path):
    with TrainingDraft(tmp_path, 1), pytest.raises(CheckpointError, match="another process is writing a checkpoint here"), TrainingDraft(tmp_path, 2):
        pass
    save(tmp_path, 3)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def altered(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm, said",
    [(truncated, r"has \d+ bytes, \d+ were written"), (altered, "was altered"), (os.remove, "is missing"), (lambda path: path.write_bytes(b""), "has 0 bytes")],
)
@pytest.mark.parametrize("name", ["model/model.safetensors", "exp_avg/config.json"])
def test_damage_is_named(tmp_path, harm, said, name):
    folder = save(tmp_path, 5)
    harm(folder / name)
    (line,) = damaged_files(folder, training_state(folder)["files"])
    assert line.startswith(name)
    assert re.search(said, line)


def test_a_state_that_is_not_whole(tmp_path):
    folder = save(tmp_path, 5)
    path = folder / "state.json"
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match=r"state.json: cannot be read as JSON .* truncated or altered"):
        training_state(folder)
    path.write_text(json.dumps(json.loads(good) | {"step": 6}))
    with pytest.raises(CheckpointError, match="it was altered"):
        training_state(folder)
    path.write_text(json.dumps(json.loads(good) | {"format": "another"}))
    with pytest.raises(CheckpointError, match="format 'another', this version reads"):
        training_state(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="names 'step-00000005', which is no checkpoint"):
        latest_training(tmp_path)
    for name in ("../elsewhere", "step-1", ""):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(CheckpointError, match="which is no checkpoint beside it"):
            latest_training(tmp_path)
    with pytest.raises(CheckpointError, match="no training checkpoint here"):
        latest_training(tmp_path / "nothing")


@pytest.mark.parametrize(
    "which, stride",
    [
        ("next", 4),
        ("replaced", 1),
        pytest.param("next", 1, marks=pytest.mark.full),
        pytest.param("same", 1, marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(which, stride, tmp_path):
    program = subprocess.run(
        [sys.executable, killed_saves.__file__, str(tmp_path), which, str(stride)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert program.returncode == 0, program.stdout + program.stderr
    kills, last = map(int, re.findall(r"\d+", program.stdout))
    assert kills > 8 and last > 8, "the saves were hardly watched"


def test_a_system_that_cannot_exchange_names(tmp_path, monkeypatch):
    monkeypatch.setattr("tio_megatron.checkpoint.writer._exchange", lambda one, other: False)
    for seed in (1, 2):
        write_checkpoint(tmp_path / "model", SMALL, tensors(seed))
        with Checkpoint(tmp_path / "model") as checkpoint:
            assert checkpoint.digests() == digests(seed)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_kill_that_follows_the_plain_way_is_caught(tmp_path):
    """Negative control: files written in place leave a mixture."""
    folder = save(tmp_path, 5, seed=1)
    write_checkpoint(folder / "model", SMALL, tensors(2))
    assert damaged_files(folder, training_state(folder)["files"]) == ["model/model.safetensors was altered (its sha256 differs)"]


def test_a_disk_that_is_too_small_is_seen_before(tmp_path):
    save(tmp_path, 5, seed=1)
    with pytest.raises(CheckpointError, match=r"needs .* GiB, .* are free on that disk; the last good one is .*step-00000005"):
        TrainingDraft(tmp_path, 6, 1 << 60)
    assert check(tmp_path, {1}) == 1


def test_a_disk_that_runs_full_while_writing(tmp_path, monkeypatch):
    no_look_ahead(monkeypatch)
    with small_disk(tmp_path / "disk", "1m") as root:
        save(root, 5, seed=1)
        (root / "filler").write_bytes(bytes(760_000 - 2 * (latest_training(root) / "model" / "model.safetensors").stat().st_size))
        for step in range(6, 40):
            try:
                save(root, step, seed=1)
            except CheckpointError as error:
                assert "No space left on device" in str(error), error
                break
        else:
            pytest.fail("the disk never ran full")
        assert check(root, {1}) == 1
        assert latest_training(root).name == f"step-{step - 1:08d}" and not list(root.glob(".draft-*"))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be written"), TrainingDraft(tmp_path / "file", 1):
        pass
