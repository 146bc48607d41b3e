"""A store of rollouts: only grows, survives kills, and shows what was changed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_batches import ABOUT, batch

from tio_megatron.rollouts import About, Batch, Place, Store, StoreError


@pytest.fixture
def store(tmp_path):
    made = Store.create(tmp_path / "store")
    for seed in range(3):
        made.append(batch(seed, sequences=seed + 1))
    return made


def test_what_was_stored_is_read(store):
    again = Store.open(store.folder)
    assert (again.batches, len(again), again.head) == (3, 6, store.head)
    for seed, held in enumerate(again):
        assert held.same(batch(seed, sequences=seed + 1)) == "" and held.about == ABOUT
    assert again.batch(0).same(batch(9, sequences=1)) != "", "control: another batch"
    assert again.place(0) == Place(0, 0) and again.place(5) == Place(2, 2)
    audit = again.verify()
    assert (audit.batches, audit.sequences, audit.head) == (3, 6, store.head)
    assert audit.tokens == sum(len(held.tokens) for held in again)


def test_gathered_rollouts_are_the_stored_ones(store):
    found = store.gather([5, 0, 2, 5])
    wanted = [store.batch(2).select([2]), store.batch(0), store.batch(1).select([1]), store.batch(2).select([2])]
    assert [a.same(b) for a, b in zip(found, wanted, strict=True)] == [""] * 4
    assert store.batch(2).select([2, 0, 1]).sequences == [store.batch(2).sequences[i] for i in (2, 0, 1)]
    with pytest.raises(StoreError, match="no rollout 6; there are 6"):
        store.gather([6])


def test_equal_batches_make_equal_files(tmp_path):
    """Nothing of the machine or the moment is in a file; another word about the batch is another file."""
    made = []
    for name, about in (("a", ABOUT), ("b", ABOUT), ("c", About())):
        store = Store.create(tmp_path / name)
        store.append(batch(about=about))
        made.append(store.head)
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("where", [3, 200, 700, -3, -40])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_flipped_bit_shows(store, number, where):
    path = store.folder / f"{number:08d}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=path.name):
        Store.open(store.folder).verify()


@pytest.mark.parametrize("keep", [0, 7, 100, 600, -1])
def test_a_file_that_is_cut_off_shows(store, keep):
    path = store.folder / "00000001.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=path.name):
        Store.open(store.folder).verify()


def test_batches_that_are_gone_moved_or_replaced_show(store, tmp_path):
    noted = store.head
    files = [store.folder / f"{number:08d}.safetensors" for number in range(3)]
    files[2].rename(tmp_path / "kept")
    with pytest.raises(StoreError, match="batches that were there are gone"):
        Store.open(store.folder).verify(noted)
    assert Store.open(store.folder).verify().batches == 2, "control: without a head nobody can know that there was a third"
    files[1].rename(files[2])
    with pytest.raises(StoreError, match="batch 1 is missing, batch 2 is there"):
        Store.open(store.folder)
    files[2].rename(files[1])
    (tmp_path / "kept").rename(files[2])
    assert Store.open(store.folder).verify(noted[:16]).head == noted
    other = Store.create(tmp_path / "other")
    other.append(batch(8))
    files[0].write_bytes((other.folder / files[0].name).read_bytes())
    with pytest.raises(StoreError, match="00000001.safetensors: follows a file .* changed or replaced"):
        Store.open(store.folder).verify()
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(StoreError, match="says that it is batch 1: moved or renamed"):
        Store.open(store.folder)


@pytest.mark.parametrize("cut", [lambda raw: raw[:-1], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: raw + b"x"], ids=["cut", "flipped", "longer"])
def test_nothing_is_appended_behind_a_damaged_batch(store, cut):
    path = store.folder / "00000002.safetensors"
    raw = path.read_bytes()
    path.write_bytes(cut(raw))
    with pytest.raises(StoreError, match="00000002.safetensors: .*; nothing is appended behind it: bring the file back, or take it out"):
        Store.open(store.folder).append(batch(7))
    path.unlink()
    assert Store.open(store.folder).append(batch(7)) == 2 and Store.open(store.folder).verify().batches == 3


def test_a_store_is_made_where_somebody_was_killed_who_made_one(tmp_path):
    (tmp_path / ".store.json.draft-99").write_text("{")
    assert Store.create(tmp_path).append(batch(7)) == 0
    assert not list(tmp_path.glob(".*.draft-*"))


def test_a_failed_append_leaves_everything_as_it_was(store, monkeypatch):
    noted, listing = store.head, sorted(os.listdir(store.folder))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device.*the 3 batches before are as they were"):
        store.append(batch(7))
    monkeypatch.undo()
    assert sorted(os.listdir(store.folder)) == listing and Store.open(store.folder).verify(noted).batches == 3
    assert store.append(batch(7)) == 3


def test_writers_that_are_killed_leave_whole_batches(tmp_path):
    """Two processes append as fast as they can and are killed; what is there is whole and in one chain, and the next writer goes on."""
    folder = tmp_path / "store"
    Store.create(folder)
    start = "import sys\nfrom rollout_batches import batch\nfrom tio_megatron.rollouts import Store\ns = Store.open(sys.argv[1])\n"
    program = start + "while True: s.append(batch(s.batches, 40))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen([sys.executable, "-c", program, str(folder)], env=environment) for _ in range(2)]
    try:
        end = time.monotonic() + 60
        while len(list(folder.glob("0*"))) < 20 and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    (folder / ".00000020.safetensors.draft-1").write_bytes(b"half a batch")
    store = Store.open(folder)
    assert store.verify().batches == store.batches >= 20
    made = [batch(seed, 40) for seed in range(store.batches)]  # each writer numbers them by what it has seen, which may be a little less
    assert all(any(held.same(one) == "" for one in made[: number + 1]) for number, held in enumerate(store)) and made[0].same(made[1]) == "lengths"
    assert store.append(batch(store.batches)) == store.batches - 1 and not list(folder.glob(".*draft*"))


def test_what_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="no store of rollouts"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"not empty \(file"):
        Store.create(tmp_path)
    Store.create(tmp_path / "new")
    with pytest.raises(StoreError, match="a store already: open it"):
        Store.create(tmp_path / "new")
    (tmp_path / "new" / "store.json").write_text('{"format": "tio_megatron rollouts 9"}')
    with pytest.raises(StoreError, match="another format"):
        Store.open(tmp_path / "new")


ROWS = {
    "no sequence": (lambda: Batch.of(ABOUT, [], [], []), "no sequence"),
    "no prompt": (lambda: Batch.of(ABOUT, [[1, 2]], [0], [[-1.0, -1.0]]), "prompt of at least one"),
    "prompt too long": (lambda: Batch.of(ABOUT, [[1]], [2]), "no longer than itself"),
    "another count": (lambda: Batch.of(ABOUT, [[1, 2]], [1], [[-1.0, -1.0]]), "sequence 0 has 1 response tokens and 2"),
    "negative token": (lambda: Batch.of(ABOUT, [[1, -2]], [1], [[-1.0]]), "token 1 is -2"),
    "huge token": (lambda: Batch.of(ABOUT, [[1, 1 << 40]], [1], [[-1.0]]), "tokens do not fit int32"),
    "text": (lambda: Batch.of(ABOUT, [[1, "a"]], [1], [[-1.0]]), "tokens do not fit int32"),
    "NaN": (lambda: Batch.of(ABOUT, [[1, 2]], [1], [[float("nan")]]), r"logprobs\[0\] is nan"),
    "above 0": (lambda: Batch.of(ABOUT, [[1, 2]], [1], [[0.5]]), "above 0"),
    "reward": (lambda: Batch.of(ABOUT, [[1, 2]], [1], rewards=[float("inf")]), r"rewards\[0\] is inf"),
    "seeds": (lambda: Batch.of(ABOUT, [[1, 2]], [1], seeds=[1, 2]), "seeds has 2 entries, 1"),
    "dtype": (lambda: Batch(ABOUT, np.array([2]), np.array([1]), np.array([1, 2])), "tokens must be int32"),
    "step": (lambda: About(step=-1), "step must be a whole number"),
    "temperature": (lambda: About(temperature=0.0), "temperature must be above 0"),
    "extra": (lambda: About(extra={"a": [1]}), r"extra\['a'\] must be text"),
    "weights": (lambda: About(weights=3), "weights must be text"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_is_refused(row):
    make, message = ROWS[row]
    with pytest.raises(StoreError, match=message):
        make()


def test_without_log_probabilities(tmp_path):
    store = Store.create(tmp_path / "store")
    store.append(batch(scored=False))
    with pytest.raises(StoreError, match="holds no log-probabilities"):
        _ = store.batch(0).responses


@settings(max_examples=150)
@given(where=st.integers(0, 10_000), value=st.binary(min_size=1, max_size=12), cut=st.booleans())
def test_damage_of_any_kind_is_one_clear_error(tmp_path_factory, where, value, cut):
    folder = tmp_path_factory.mktemp("fuzz")
    store = Store.create(folder)
    store.append(batch())
    path = folder / "00000000.safetensors"
    raw = path.read_bytes()
    where %= len(raw)
    damaged = raw[:where] + value + (b"" if cut else raw[where + len(value) :])
    path.write_bytes(damaged)
    if damaged == raw:
        assert Store.open(folder).verify().batches == 1
        return
    with pytest.raises(StoreError, match="00000000.safetensors"):
        Store.open(folder).verify()


def test_a_store_is_a_recording(store):
    from tio_megatron.verify.readers import read_scored

    found = list(read_scored(store.folder))
    wanted = [(ids, row.tolist()) for held in store for ids, row in zip(held.sequences, held.responses, strict=True)]
    assert [(one.tokens.tolist(), one.logprobs.tolist()) for one in found] == wanted
    assert json.loads((store.folder / "store.json").read_text()) == {"format": "tio_megatron rollouts 1"}
