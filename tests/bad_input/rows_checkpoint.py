"""HF folders that are not what they should be."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from killed_saves import SMALL, tensors
from safetensors.torch import load_file, save_file

from tests.bad_input.table import Row
from tio_megatron.checkpoint import Checkpoint, write_checkpoint

PART = "HF checkpoints"
NORM, EXPERT = "model.norm.weight", "model.layers.0.mlp.experts.1.down_proj.weight"
Act = Callable[[Path], Callable[[], object]]


def opened(path: Path | None) -> Callable[[], object]:
    """Open it and read everything."""

    def act() -> None:
        with Checkpoint(path) as checkpoint:
            for _ in checkpoint.tensors():
                pass

    return act


def made(folder: Path, **options: Any) -> Path:
    write_checkpoint(folder / "m", SMALL, tensors(1), **options)
    return folder / "m"


def held(change: Callable[[dict[str, torch.Tensor]], object]) -> Act:
    """A checkpoint whose tensors were changed."""

    def act(folder: Path) -> Callable[[], object]:
        path = made(folder)
        found = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, path / "model.safetensors")
        return opened(path)

    return act


def header(change: Callable[[dict[str, Any]], object], length: int | None = None) -> Act:
    """A checkpoint whose safetensors header says something else, or is said to have another length."""

    def act(folder: Path) -> Callable[[], object]:
        path = made(folder) / "model.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8 : 8 + size])
        change(found)
        text = json.dumps(found).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + raw[8 + size :])
        return opened(path.parent)

    return act


def config(**fields: Any) -> Act:
    def act(folder: Path) -> Callable[[], object]:
        path = made(folder)
        (path / "config.json").write_text(json.dumps(SMALL | fields))
        return opened(path)

    return act


def index(target: str) -> Act:
    """An index that says that a shard lies elsewhere."""

    def act(folder: Path) -> Callable[[], object]:
        path = made(folder, shard_bytes=9000)
        file = path / "model.safetensors.index.json"
        found = json.loads(file.read_text())
        found["weight_map"][NORM] = target.format(folder=folder)
        file.write_text(json.dumps(found))
        return opened(path)

    return act


def files(change: Callable[[Path], object], **options: Any) -> Act:
    def act(folder: Path) -> Callable[[], object]:
        path = made(folder, **options)
        change(path)
        return opened(path)

    return act


def value(name: str, number: float) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(found: dict[str, torch.Tensor]) -> None:
        found[name].view(-1)[-1] = number

    return change


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def dangling(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.symlink("/nowhere/model.safetensors", path / "model.safetensors")


def loop(path: Path) -> None:
    (path / "config.json").unlink()
    os.symlink("config.json", path / "config.json")


def part(axis: int, start: int, stop: int) -> Act:
    """Elements of a tensor that is well."""

    def act(folder: Path) -> Callable[[], object]:
        path = made(folder)

        def run() -> None:
            with Checkpoint(path) as checkpoint:
                checkpoint.part(EXPERT, axis, start, stop)

        return run

    return act


def writing(before: Callable[[Path], object] = lambda path: None, config: Any = SMALL, given: Any = None, shard_bytes: int = 1 << 20) -> Act:
    """Write a checkpoint; ``before`` prepares its place."""

    def act(folder: Path) -> Callable[[], object]:
        before(folder / "new")
        return lambda: write_checkpoint(folder / "new", config, tensors(1) if given is None else given, shard_bytes=shard_bytes)

    return act


ROWS = [
    Row(PART, "a tensor missing", f"1 tensors missing: {NORM}", held(lambda t: t.pop(NORM))),
    Row(
        PART,
        "a tensor too many",
        "1 tensors the model has no place for: model.layers.9.mlp.gate.weight",
        held(lambda t: t.update({"model.layers.9.mlp.gate.weight": t[NORM].clone()})),
    ),
    Row(
        PART,
        "a tensor renamed",
        f"1 tensors missing: {NORM}; 1 tensors the model has no place for: norm.weight",
        held(lambda t: t.update({"norm.weight": t.pop(NORM)})),
    ),
    Row(PART, "a tensor transposed", f"{EXPERT} is [16, 32], config.json makes it [32, 16]", held(lambda t: t.update({EXPERT: t[EXPERT].t()}))),
    Row(PART, "a tensor with a row less", f"{EXPERT} is [31, 16], config.json makes it [32, 16]", held(lambda t: t.update({EXPERT: t[EXPERT][1:]}))),
    Row(PART, "a tensor in float16", f"config.json says dtype bfloat16, but {NORM} is F16", held(lambda t: t.update({NORM: t[NORM].half()}))),
    Row(PART, "a tensor in fp8", f"but {NORM} is F8_E4M3", held(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}))),
    Row(PART, "a tensor of whole numbers", f"but {NORM} is I64", held(lambda t: t.update({NORM: t[NORM].long()}))),
    Row(
        PART, "a NaN among the weights", f"{NORM} has 1 values that are NaN or infinite (of those read, the first is at [31])", held(value(NORM, float("nan")))
    ),
    Row(PART, "an infinity among an expert's weights", f"{EXPERT} has 1 values that are NaN or infinite", held(value(EXPERT, float("-inf")))),
    Row(PART, "a file cut off", "model.safetensors: not a whole safetensors file", files(cut)),
    Row(PART, "an empty file", "model.safetensors: not a whole safetensors file", files(lambda p: (p / "model.safetensors").write_bytes(b""))),
    Row(PART, "a header that lies about a tensor's size", "not a whole safetensors file", header(lambda h: h[NORM].update(shape=[1 << 40]))),
    Row(PART, "a header whose tensors overlap", "not a whole safetensors file", header(lambda h: h[NORM].update(data_offsets=h[EXPERT]["data_offsets"]))),
    Row(PART, "a header said to have 2**63 bytes", "not a whole safetensors file", header(lambda h: None, 1 << 63)),
    Row(
        PART, "a pickle named model.safetensors", "not a whole safetensors file", files(lambda p: (p / "model.safetensors").write_bytes(b"\x80\x02}q\x00." * 9))
    ),
    Row(PART, "only pytorch_model.bin", "convert it to safetensors", files(lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"))),
    Row(PART, "a link to nowhere in the place of the weights", "neither model.safetensors nor model.safetensors.index.json", files(dangling)),
    Row(PART, "a link in a circle in the place of config.json", "config.json: cannot be read", files(loop)),
    Row(PART, "an index that names ../x", "file names in the same folder, it has '../x'", index("../x")),
    Row(PART, "an index that names /etc/passwd", "file names in the same folder, it has '/etc/passwd'", index("/etc/passwd")),
    Row(PART, "an index that names the folder itself", "file names in the same folder, it has '.'", index(".")),
    Row(PART, "an index that names a file of 5000 letters", "file names in the same folder", index("x" * 5000)),
    Row(PART, "an index that names a shard that is not there", "missing are other.safetensors; copy them too", index("other.safetensors")),
    Row(
        PART,
        "a shard missing",
        "missing are model-00002-of-00004.safetensors; copy them too",
        files(lambda p: (p / "model-00002-of-00004.safetensors").unlink(), shard_bytes=9000),
    ),
    Row(PART, "config.json with another hidden size", "tensors of another shape", config(hidden_size=64)),
    Row(PART, "config.json with more layers", "tensors missing: model.layers.1.", config(num_hidden_layers=2)),
    Row(PART, "config.json with a milliard experts", "config.json asks for 1 layers of 1000000000 experts", config(num_experts=10**9)),
    Row(PART, "config.json with another dtype", "config.json says dtype float32, but", config(torch_dtype="float32")),
    Row(PART, "config.json with a sliding window", "use_sliding_window is True, supported is False", config(use_sliding_window=True)),
    Row(
        PART,
        "config.json of a quantized model",
        "quantized weights are not supported (use the bf16 checkpoint)",
        config(quantization_config={"quant_method": "fp8"}),
    ),
    Row(
        PART, "config.json of another architecture", "supported are [['Qwen3ForCausalLM'], ['Qwen3MoeForCausalLM']]", config(architectures=["LlamaForCausalLM"])
    ),
    Row(
        PART,
        "config.json that names code of the folder",
        "auto_map names Python code of the folder, which is never run",
        config(auto_map={"AutoConfig": "x.X"}),
    ),
    Row(PART, "config.json with norm_topk_prob null", "norm_topk_prob is None, it must be true or false", config(norm_topk_prob=None)),
    Row(PART, "config.json with a model_type that is a number", "model_type is 5, it must be text", config(model_type=5)),
    Row(PART, "config.json of another class of transformers", "model_type is 'llama', supported is", config(model_type="llama")),
    Row(PART, "config.json with tie_word_embeddings as text", "tie_word_embeddings is 'false', it must be true or false", config(tie_word_embeddings="false")),
    Row(PART, "config.json with dropout", "attention_dropout is 0.1, supported is 0", config(attention_dropout=0.1)),
    Row(PART, "config.json with a head size of text", "not whole numbers: head_dim = 'wide'", config(head_dim="wide")),
    Row(PART, "a part along an axis that the tensor lacks", f"{EXPERT}: axis is 5, a part of [32, 16] is taken along [0, 1]", part(5, 0, 1)),
    Row(PART, "a part behind the tensor's end", f"{EXPERT}: elements [8, 99) along axis 0 are asked for, it has [0, 32)", part(0, 8, 99)),
    Row(PART, "a part from a number below zero", f"{EXPERT}: elements [-1, 2) along axis 1 are asked for, it has [0, 16)", part(1, -1, 2)),
    Row(PART, "no path at all", "the folder is None; expected its path as text", lambda folder: opened(None)),
    Row(PART, "writing where a file is", "is a file, not a folder", writing(lambda path: path.write_text("mine"))),
    Row(PART, "writing into files of no bytes", "shard_bytes is 0; expected a whole number of bytes", writing(shard_bytes=0)),
    Row(PART, "writing what is no tensor", "is str, not a tensor", writing(given=[(NORM, "weights")])),
    Row(PART, "writing without a configuration", "the configuration is NoneType; expected the contents of a config.json", writing(config=None)),
    Row(
        PART,
        "a folder that is not there",
        "no such folder; a checkpoint is an HF folder with config.json and *.safetensors",
        lambda folder: opened(folder / "nowhere"),
    ),
]
