"""Reading and writing HF folders: same bytes back, and every fault named."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tio_megatron.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    digest_differences,
    manifest_digest,
    row_digests,
    tensor_digest,
    tensor_table,
    write_checkpoint,
)

from .conftest import DENSE, MOE, QWEN3_30B_A3B, tensors


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5000], ids=["one file", "shards"])
def test_round_trip_gives_the_same_bytes(tmp_path, config, shard_bytes):
    digests = write_checkpoint(tmp_path / "m", config, tensors(config), shard_bytes=shard_bytes)
    with Checkpoint(tmp_path / "m") as checkpoint:
        assert (len(checkpoint.files) > 1) == (shard_bytes == 5000)
        for name, tensor in tensors(config):
            assert checkpoint.tensor(name).dtype == tensor.dtype
            assert tensor_digest(checkpoint.tensor(name)) == tensor_digest(tensor) == digests[name]
        assert checkpoint.digests() == digests
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_part_is_the_slice_of_the_whole(make):
    with Checkpoint(make()) as checkpoint:
        name = "model.layers.0.self_attn.o_proj.weight"
        whole = checkpoint.tensor(name)
        for axis in (0, 1):
            assert tensor_digest(checkpoint.part(name, axis, 8, 24)) == tensor_digest(whole.narrow(axis, 8, 16))
        with pytest.raises(KeyError, match="no.such"):
            checkpoint.tensor("no.such")


def test_views_of_one_storage_are_written_whole(tmp_path):
    block = torch.cat([t.reshape(-1) for _, t in tensors(DENSE)])
    views, at = [], 0
    for name, tensor in tensors(DENSE):
        views.append((name, block[at : at + tensor.numel()].view(tensor.shape)))
        at += tensor.numel()
    write_checkpoint(tmp_path / "m", DENSE, views)
    with Checkpoint(tmp_path / "m") as checkpoint:
        assert not digest_differences(checkpoint.digests(), {name: tensor_digest(t) for name, t in tensors(DENSE)})


def test_a_tied_model_may_store_its_head_when_it_is_the_embedding(make):
    path = make(MOE | {"tie_word_embeddings": True})
    held = load_file(path / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, path / "model.safetensors")
    with Checkpoint(path) as checkpoint:
        assert "lm_head.weight" not in checkpoint.table
    held["lm_head.weight"][0, 0] += 1
    save_file(held, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        Checkpoint(path)


def test_a_folder_as_large_as_the_real_model_opens(tmp_path):
    """Qwen3-30B-A3B as it is published: 18867 tensors in 16 shards, 61 GB; the files are sparse, so nothing of it is on the disk."""
    config = CheckpointConfig.from_dict(QWEN3_30B_A3B)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    specs = list(tensor_table(config.shape).values())
    weight_map = {}
    for shard in range(16):
        file, header, size = f"model-{shard + 1:05d}-of-00016.safetensors", {}, 0
        for spec in specs[shard * len(specs) // 16 : (shard + 1) * len(specs) // 16]:
            header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [size, size + 2 * spec.numel]}
            size += 2 * spec.numel
        text = json.dumps(header).encode()
        with open(tmp_path / file, "wb") as held:
            held.write(struct.pack("<Q", len(text)) + text)
            held.truncate(8 + len(text) + size)
        weight_map |= dict.fromkeys(header, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with Checkpoint(tmp_path) as checkpoint:
        assert (len(checkpoint.files), len(checkpoint.table)) == (16, 18867)
        last = "model.layers.47.mlp.experts.127.down_proj.weight"
        assert checkpoint.tensor(last).shape == (2048, 768) and not checkpoint.part(last, 1, 384, 768).any()


def edit(path: Path, change) -> None:
    held = load_file(path / "model.safetensors")
    change(held)
    save_file(held, path / "model.safetensors")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors missing: model.norm.weight"),
        (lambda t: t.update({"model.layers.9.mlp.gate.weight": torch.zeros(1)}), "no place for: model.layers.9.mlp.gate.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7, dtype=torch.bfloat16)}), r"model.norm.weight is \[7\], config.json makes it \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32)}), "says dtype bfloat16, but model.norm.weight is F32"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.float16)}), "model.norm.weight is F16"),
        (lambda t: [t.pop(n) for n in list(t) if "experts" in n], r"24 tensors missing: .* and 18 more"),
    ],
)
def test_wrong_tensors_are_named(make, change, said):
    path = make()
    edit(path, change)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(path)


def test_a_folder_that_is_none(tmp_path, make):
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        Checkpoint(tmp_path / "empty")
    path = make()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert it to safetensors"):
        Checkpoint(path)


def test_damaged_files_are_named(make):
    path = make(shard_bytes=5000)
    shards = sorted(path.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match=f"{shards[1].name}: not a whole safetensors file"):
        Checkpoint(path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"missing are {shards[1].name}"):
        Checkpoint(path)
    shards[1].write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CheckpointError, match=f"{shards[1].name} lacks model"):
        Checkpoint(path)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {name: "../x" for name in good["weight_map"]}}))
    with pytest.raises(CheckpointError, match="in the same folder"):
        Checkpoint(path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as an index"):
        Checkpoint(path)


def test_a_failed_write_leaves_the_old_folder(make, tmp_path):
    path = make()
    before = (path / "model.safetensors").read_bytes()

    def broken():
        yield from list(tensors(MOE))[:3]
        raise RuntimeError("the trainer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        write_checkpoint(path, MOE, broken())
    for wrong, said in (
        (list(tensors(MOE))[:-1], "1 tensors were not given, the first is lm_head.weight"),
        ([("model.norm.weight", torch.zeros(3))], "is torch.float32"),
        ([("x", torch.zeros(3))], "no place"),
        (list(tensors(MOE))[:1] * 2, "given twice"),
    ):
        with pytest.raises(CheckpointError, match=said):
            write_checkpoint(path, MOE, wrong)
    assert (path / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_two_processes_that_write_one_folder(make, tmp_path):
    """The later one stands, whenever the other got there: here, after it was looked for."""
    other = make()
    seen = []

    def late(tensors):
        yield from tensors
        seen.append(shutil.copytree(other, tmp_path / "both"))

    changed = [(name, tensor + 1) for name, tensor in tensors(MOE)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "exists", lambda path, *, stock=Path.exists: False if path == tmp_path / "both" else stock(path))
        digests = write_checkpoint(tmp_path / "both", MOE, late(changed))
    with Checkpoint(tmp_path / "both") as checkpoint, Checkpoint(other) as before:
        assert seen and checkpoint.digests() == digests != before.digests()
    assert not list(tmp_path.glob(".both*"))


def test_too_small_a_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match="GiB are free on that disk"):
        write_checkpoint(tmp_path / "m", MOE, tensors(MOE))
    assert list(tmp_path.iterdir()) == []


def test_digests_see_every_bit_and_no_name():
    a = torch.tensor([0.0, 1.0])
    assert tensor_digest(a) == tensor_digest(a.clone())
    assert len({tensor_digest(t) for t in (a, torch.tensor([-0.0, 1.0]), a.bfloat16(), a.view(1, 2), a.flip(0))}) == 5
    ours, theirs = {"a": "1" * 64, "b": "2" * 64}, {"b": "3" * 64, "c": "4" * 64}
    assert digest_differences(ours, ours) == []
    assert [line.split(":")[0] for line in digest_differences(ours, theirs)] == ["a", "b", "c"]
    assert manifest_digest({"a": "x", "b": "y"}) == manifest_digest({"b": "y", "a": "x"}) != manifest_digest({"a": "y", "b": "x"})
    rows = torch.randn(3, 5)
    assert row_digests(rows) == row_digests(rows.clone()) and len(set(row_digests(rows))) == 3
    ours, theirs = rows.clone(), rows.clone()
    ours[0, 1], theirs[0, 1] = float("nan"), -torch.tensor(float("nan"))
    assert row_digests(ours) == row_digests(theirs) != row_digests(rows)
    with pytest.raises(ValueError, match="fp32"):
        row_digests(rows.bfloat16())
