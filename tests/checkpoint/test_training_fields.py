"""A state.json that was edited and signed anew is refused before anything is loaded, with the file and the field."""

import copy
import json
import re

import pytest
from killed_saves import save, whole_state

from tio_megatron.checkpoint import CheckpointError, TrainingDraft, damaged_files, latest_training, training, training_state, unlisted_files, whole_beside

GONE = object()
FIRST = "model/model.safetensors"
TOP = (
    "step",
    "position",
    "settings",
    "contract",
    "fingerprint",
    "kernels",
    "model",
    "training",
    "optimizer",
    "schedule",
    "largest",
    "random",
    "written",
    "files",
)
NULL = tuple(name for name in TOP if name != "schedule")
EDITS = [((name,), GONE, f"{name} is missing") for name in TOP]
EDITS += [((name,), None, f"{name} is None, it must be") for name in NULL]
EDITS += [((name,), [1], f"{name} is [1], it must be") for name in TOP]
EDITS += [
    (("step",), -1, "step is -1, it must be a whole number from 0 on"),
    (("step",), True, "step is True"),
    (("step",), 2.0, "step is 2.0"),
    (("step",), 10**400, "step is 1000"),
    (("contract", "cuts"), 3, "contract.cuts is 3, it must be an object"),
    (("model",), {}, "model is empty"),
    (("files",), {}, "files is empty"),
    (("files", "../../elsewhere"), {"bytes": 1, "sha256": "0" * 64}, "files names '../../elsewhere', which cannot be"),
    (("files", "/etc/hosts"), {"bytes": 1, "sha256": "0" * 64}, "files names '/etc/hosts'"),
    (("files", FIRST), 5, f"files.{FIRST} is 5, it must be an object"),
    (("files", FIRST, "bytes"), "many", f"files.{FIRST}.bytes is 'many'"),
    (("files", FIRST, "sha256"), GONE, f"files.{FIRST}.sha256 is missing"),
    (("largest", "model.norm.weight"), "nan", "largest.model.norm.weight is 'nan', it must be a hexadecimal number from 0 on"),
    (("largest", "model.norm.weight"), "inf", "largest.model.norm.weight is 'inf'"),
    (("largest", "model.norm.weight"), (-1.0).hex(), "largest.model.norm.weight is '-0x1"),
    (("largest", "model.norm.weight"), (2.0**128).hex(), "that fp32 can hold"),
    (("largest", "model.norm.weight"), "hello", "largest.model.norm.weight is 'hello'"),
    (("largest", "model.norm.weight"), 0.5, "largest.model.norm.weight is 0.5"),
    (("optimizer", "step"), "x", "optimizer.step is 'x', it must be a whole number"),
    (("optimizer", "clip_grad"), float("nan"), "optimizer.clip_grad is nan, it must be a finite number"),
    (("optimizer", "groups"), [], "optimizer.groups has 0 entries"),
    (("optimizer", "groups", 0), 7, "optimizer.groups[0] is 7"),
    (("optimizer", "groups", 0, "wd_mult"), GONE, "optimizer.groups[0].wd_mult is missing"),
    (("optimizer", "groups", 0, "lr"), 10**400, "optimizer.groups[0].lr is 1000"),
    (("optimizer", "groups", 0, "betas"), [0.9], "optimizer.groups[0].betas has 1 entries, it must have 2"),
    (("optimizer", "groups", 0, "betas", 1), "x", "optimizer.groups[0].betas[1] is 'x'"),
    (("optimizer", "groups", 0, "tensors"), [3], "optimizer.groups[0].tensors[0] is 3, it must be text"),
    (("schedule", "num_steps"), "x", "schedule.num_steps is 'x'"),
    (("random", "ranks"), [], "random.ranks has 0 entries"),
    (("random", "ranks", 0, "torch"), "cd", "random.ranks[0].torch is 'cd', no state has that name"),
    (("random", "states"), GONE, "random.states is missing"),
    (("random", "states", "ab"), 4, "random.states.ab is 4, it must be text"),
    (("written", "layout"), GONE, "written.layout is missing"),
    (("written", "layout", "tp"), "2", "written.layout.tp is '2'"),
]


def edited(state, path, value):
    """``state`` with one value replaced, or gone."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def signed(folder, state):
    state = {name: value for name, value in state.items() if name != "sha256"}
    (folder / "state.json").write_text(json.dumps(state | {"sha256": training._own_digest(state)}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("root"), 5)


@pytest.mark.parametrize("path, value, said", EDITS, ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "")
def test_an_edited_field_is_named(folder, path, value, said):
    good = training_state(folder)
    try:
        signed(folder, edited(good, path, value))
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(folder / 'state.json'))}: .*{re.escape(said)}"):
            training_state(folder)
    finally:
        signed(folder, good)


def test_control_what_may_be_is_read(folder):
    good = training_state(folder)
    try:
        for path, value in (
            (("schedule",), None),
            (("largest",), {}),
            (("position",), {"next": [1, None]}),
            (("optimizer", "groups", 0, "max_lr"), 1e-3),
            (("more",), 1),
        ):
            changed = edited(good, path, value)
            signed(folder, changed)
            assert training_state(folder) == changed
    finally:
        signed(folder, good)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"format": ' + "[" * 900 + "]" * 900 + "}", "NaN", "1" * 5000, ""])
def test_what_is_no_state_is_named_by_its_path(folder, text):
    good = training_state(folder)
    try:
        (folder / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=re.escape(str(folder / "state.json"))):
            training_state(folder)
    finally:
        signed(folder, good)


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    save(tmp_path, 5, seed=1)
    with TrainingDraft(tmp_path, 6) as draft, pytest.raises(CheckpointError, match="the checkpoint of step 6 would not load: .*largest.a is 'nan'"):
        (draft.path / "file").write_text("")
        draft.commit(whole_state(6) | {"largest": {"a": "nan"}})
    assert latest_training(tmp_path).name == "step-00000005" and not list(tmp_path.glob(".draft-*"))


def test_files_that_would_be_read_and_were_not_written(tmp_path):
    folder = save(tmp_path, 5)
    state = training_state(folder)
    assert unlisted_files(folder, state["files"]) == []
    (folder / "model" / "tokenizer.json").write_text("{}")  # for whoever serves the folder
    (folder / "model" / "model.safetensors.index.json").write_text("{}")
    assert unlisted_files(folder, state["files"]) == ["model/model.safetensors.index.json is not among the files that were written"]
    some = {name: entry for name, entry in state["files"].items() if not name.startswith("exp_avg/")}
    assert len(unlisted_files(folder, some)) == 3 and not damaged_files(folder, some)


def test_the_newest_whole_one_is_named(tmp_path):
    first, second, third, fourth = (save(tmp_path, step) for step in (2, 5, 10, 11))
    (fourth / "state.json").unlink()
    with pytest.raises(CheckpointError, match=f"latest: names 'step-00000011', which is no checkpoint beside it; {third} is whole: load it by its folder"):
        latest_training(tmp_path)
    (third / FIRST).write_bytes(b"")
    assert whole_beside(tmp_path) == f"{second} is whole: load it by its folder"
    assert whole_beside(tmp_path, damaged=second) == f"{first} is whole: load it by its folder"
    (second / "state.json").write_text("{}")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=rf"no training checkpoint here .*; {first} is whole"):
        latest_training(tmp_path)
    (first / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is whole"):
        latest_training(tmp_path)
