"""Names that stand twice in one object or mapping, of which every reader would take one without a word; and numbers of thousands of digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_batches import batch

from tests.bad_input.rows_checkpoint import made, opened
from tests.bad_input.table import Row
from tio_megatron.contract import Contract
from tio_megatron.contract.environment import read
from tio_megatron.rollouts import Store
from tio_megatron.verify.doctor.settings import trainer
from tio_megatron.verify.matrix.table import Table
from tio_megatron.verify.readers import read_scored

PART = "names given twice, numbers without end"
Act = Callable[[Path], Callable[[], object]]
LONG = "1" + "0" * 5000


def text(name: str, content: str, then: Callable[[Path], object]) -> Act:
    """A file of ``content``, which ``then`` reads."""

    def act(folder: Path) -> Callable[[], object]:
        path = folder / name
        path.write_text(content)
        return lambda: then(path)

    return act


def checkpoint(file: str, old: str, new: str) -> Act:
    """A checkpoint in whose JSON file a piece of text was replaced."""

    def act(folder: Path) -> Callable[[], object]:
        path = made(folder, **({"shard_bytes": 1 << 12} if "index" in file else {}))
        held = (path / file).read_text() if (path / file).exists() else "{}"
        assert old in held
        (path / file).write_text(held.replace(old, new, 1))
        return opened(path)

    return act


def header_twice(folder: Path) -> Callable[[], object]:
    path = made(folder) / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + size].rstrip()
    name = b'"model.norm.weight":'
    entry = head[head.index(name) :]
    entry = entry[: entry.index(b"}") + 1]
    head = head[:-1] + b"," + entry + b"}"
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + size :])
    return opened(path.parent)


def store_twice(folder: Path) -> Callable[[], object]:
    store = Store.create(folder / "s")
    store.append(batch(1))
    path = folder / "s" / "store.json"
    path.write_text('{"format": "x", ' + path.read_text().lstrip()[1:])
    return lambda: Store.open(folder / "s")


ROWS = [
    Row(
        PART,
        "a contract with a cut given twice",
        "contract: not JSON ('vocab' is given twice)",
        lambda _: lambda: Contract.from_json('{"cuts": {"vocab": 4, "vocab": 8}}'),
    ),
    Row(
        PART,
        "`TIO_CONTRACT` with a field given twice",
        "contract: not JSON ('cuts' is given twice)",
        lambda _: lambda: read('{"cuts": {}, "cuts": {"vocab": 4}}'),
    ),
    Row(
        PART, "a contract with a number of 5000 digits", "contract: not JSON (a number has too many digits)", lambda _: lambda: read('{"grain": ' + LONG + "}")
    ),
    Row(
        PART,
        "config.json with a size given twice",
        "cannot be read as JSON ('vocab_size' is given twice)",
        checkpoint("config.json", "{", '{"vocab_size": 7, '),
    ),
    Row(
        PART,
        "config.json with a number of 5000 digits",
        "cannot be read as JSON (a number has too many digits)",
        checkpoint("config.json", "{", '{"x": ' + LONG + ", "),
    ),
    Row(
        PART,
        "tokenizer_config.json that names code once and none once",
        "'auto_map' is given twice; take the model's own file",
        checkpoint("tokenizer_config.json", "{", '{"auto_map": {"a": "b.c"}, "auto_map": null'),
    ),
    Row(
        PART,
        "an index with a tensor given twice",
        "'model.norm.weight' is given twice",
        checkpoint("model.safetensors.index.json", '"model.norm.weight"', '"model.norm.weight": "x.safetensors", "model.norm.weight"'),
    ),
    Row(PART, "a safetensors header with a tensor given twice", "model.safetensors: 'model.norm.weight' is given twice; copy it again", header_twice),
    Row(PART, "a store of rollouts whose format is given twice", "store.json: cannot be read ('format' is given twice)", store_twice),
    Row(
        PART,
        "rollouts with log-probabilities given twice in a line",
        "line 1: it is no JSON ('logprobs' is given twice)",
        text("r.jsonl", '{"tokens": [1, 2], "logprobs": [-1.0], "logprobs": [-2.0]}\n', lambda path: list(read_scored(path))),
    ),
    Row(
        PART,
        "a table of layouts (YAML) with its trainers given twice",
        "'trainers' is given twice, the second time in line 3",
        text("t.yaml", "model: m\ntrainers: [tp1]\ntrainers: [tp2]\nrollouts: [tp1]\n", Table.from_file),
    ),
    Row(
        PART,
        "settings (YAML) with one given twice",
        "'tensor_model_parallel_size' is given twice, the second time in line 2",
        text("s.yaml", "tensor_model_parallel_size: 2\ntensor_model_parallel_size: 4\n", lambda path: trainer(str(path))),
    ),
    Row(
        PART,
        "settings (JSON) with one given twice",
        "'tensor_model_parallel_size' is given twice",
        text("s.json", '{"tensor_model_parallel_size": 2, "tensor_model_parallel_size": 4}', lambda path: trainer(str(path))),
    ),
    Row(
        PART,
        "settings (YAML) with a number of 5000 digits",
        "cannot be read (a number has too many digits)",
        text("s.yaml", f"x: {LONG}\n", lambda path: trainer(str(path))),
    ),
]
