"""A trace that lost tokens is not equal to anything: what was not compared is said. Tensors that changed places name no side."""

import json
import struct

import pytest
import torch
from faults import examine
from planted_faults import clean

from tio_megatron.integrations.transformers_models.recorder import load_hf, record_hf
from tio_megatron.testing.qwen3 import DENSE, ragged, write_tiny
from tio_megatron.traces import open_trace
from tio_megatron.verify.diagnosis import diagnose


def forget(folder, chosen, part=lambda count: slice(None)):
    """Write zeros over ``#columns`` of the points that ``chosen`` picks, as a page that never reached the disk leaves them."""
    path = folder / "rows.safetensors"
    raw = bytearray(path.read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    for name, entry in header.items():
        if name.endswith("#columns") and chosen(name.removesuffix("#columns")):
            start, end = (8 + size + at for at in entry["data_offsets"])
            which = part((end - start) // 4)
            cells = memoryview(raw)[start:end].cast("i")
            for i in range(len(cells))[which]:
                cells[i] = 0
            cells.release()
    path.write_bytes(raw)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(
    ("chosen", "part", "says"),
    [
        (lambda name: True, lambda n: slice(None), "no token at any point in common"),
        (lambda name: name.startswith("layers."), lambda n: slice(None), "no token was recorded on both sides"),
        (lambda name: name.startswith("layers.1."), lambda n: slice(None), "tokens are missing in {side}, which has them at other points"),
        (lambda name: name.endswith(".attn_norm"), lambda n: slice(n - 1, None), "1 tokens are missing in {side}, which has them at other points"),
    ],
    ids=["all", "all layers", "a layer", "one token of a point"],
)
def test_lost_tokens_are_not_equal(side, chosen, part, says, tmp_path):
    clean(100, tmp_path / "pair")
    assert examine(tmp_path / "pair").status == 0
    forget(tmp_path / "pair" / side, chosen, part)
    found = examine(tmp_path / "pair")
    said = found.verdict + " " + " ".join(found.evidence)
    assert (found.kind, found.status) == ("equal", 2) and found.verdict.startswith("could not tell") and says.format(side=side) in said, found


def test_tokens_that_one_side_never_saw_are_no_fault(tmp_path):
    clean(100, tmp_path / "pair")
    forget(tmp_path / "pair" / "B", lambda name: True, lambda n: slice(0, 3))
    forget(tmp_path / "pair" / "A", lambda name: name in ("logits", "logprob", "final_norm"), lambda n: slice(0, 5))
    found = examine(tmp_path / "pair")
    assert found.status == 0 and found.verdict.startswith("equal: "), found


@pytest.mark.parametrize("swap", [True, False])
def test_a_side_is_named_for_a_moved_tensor_only_where_one_is_held_twice(swap, tmp_path):
    path = write_tiny(tmp_path / "model", DENSE, num_hidden_layers=2, hidden_size=64, vocab_size=100, num_attention_heads=4, num_key_value_heads=2)
    model, sequences = load_hf(path), ragged((5, 9), vocab=100)
    record_hf(model, sequences, tmp_path / "a", keep=["all"])
    first, second = (model.model.layers[i].self_attn.o_proj.weight for i in (0, 1))
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        if swap:
            second.copy_(kept)
    record_hf(model, sequences, tmp_path / "b", keep=["all"])
    for names, side in (("ab", "B"), ("ba", "A")):
        found = diagnose(*(open_trace(tmp_path / name) for name in names))
        assert (found.cause, found.point) == ("weights-moved", "layers.0.o_proj"), found
        assert found.side == ("" if swap else side) and found.side_reason, found
