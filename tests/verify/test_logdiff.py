"""logdiff: right numbers on known differences, every format says the same, and bad input is refused in one precise line."""

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tio_megatron.cli import app
from tio_megatron.verify import Recording
from tio_megatron.verify.logdiff import logdiff
from tio_megatron.verify.readers import read_scored

PLAIN = [([5, 6, 7, 8], [-1.0, -2.0, -0.5]), ([9, 9], [-0.25])]


def lines(path, sequences, **renamed):
    names = {"tokens": "tokens", "logprobs": "logprobs"} | renamed
    path.write_text("".join(json.dumps({names["tokens"]: tokens, names["logprobs"]: values}) + "\n" for tokens, values in sequences))
    return path


def compared(a, b, **fields):
    return logdiff(read_scored(a, fields.get("field_a")), read_scored(b, fields.get("field_b")))


def test_every_format_holds_the_same(tmp_path):
    jsonl = lines(tmp_path / "a.jsonl", PLAIN)
    recording = Recording.of([tokens for tokens, _ in PLAIN], [1, 1], [values for _, values in PLAIN])
    recording.save(tmp_path / "a.npz")
    flat = {"lengths": torch.tensor(recording.lengths), "tokens": torch.tensor(recording.tokens), "logprobs": torch.tensor(recording.logprobs)}
    save_file(flat, tmp_path / "flat.safetensors")
    table = {"tokens": torch.tensor([[5, 6, 7, 8], [9, 9, 0, 0]]), "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.25, math.nan, math.nan]])}
    save_file(table | {"lengths": torch.tensor([4, 2])}, tmp_path / "table.safetensors")
    nulls = lines(tmp_path / "nulls.jsonl", [(tokens, [None, *values]) for tokens, values in PLAIN], tokens="input_ids")
    np.savez_compressed(tmp_path / "squeezed.npz", tokens=recording.tokens, logprobs=recording.logprobs, lengths=recording.lengths)
    for other in ("a.npz", "flat.safetensors", "table.safetensors", "squeezed.npz", nulls.name):
        found = compared(jsonl, tmp_path / other)
        assert (found.status, found.tokens, found.nonzero, found.max_abs) == (0, 4, 0, 0.0), other


def test_bf16_log_probabilities_are_read_exactly(tmp_path):
    values = torch.tensor([-1.0, -0.3], dtype=torch.bfloat16)
    save_file({"tokens": torch.tensor([1, 2, 3]), "logprobs": values}, tmp_path / "a.safetensors")
    assert next(read_scored(tmp_path / "a.safetensors")).logprobs.tolist() == values.float().tolist()


def test_the_numbers(tmp_path):
    changed = [([5, 6, 7, 8], [-1.0, -1.5, -0.5]), ([9, 9], [-1.25])]
    found = compared(lines(tmp_path / "a.jsonl", changed), lines(tmp_path / "b.jsonl", PLAIN))
    assert (found.status, found.tokens, found.nonzero, found.max_abs, found.mean_abs) == (1, 4, 2, 1.0, 0.375)
    assert found.k1 == 0.125  # mean of b - a
    assert found.k3 == (math.expm1(0.5) - 0.5 + math.expm1(-1.0) + 1.0) / 4
    assert (found.ratio_min, found.ratio_max, found.extreme) == (math.exp(-1.0), math.exp(0.5), 1)
    assert (found.first.sequence, found.first.position, found.first.token, found.first.a, found.first.b) == (0, 2, 7, -1.5, -2.0)
    assert found.first.context == [(0, 5, None, None), (1, 6, -1.0, -1.0), (2, 7, -1.5, -2.0), (3, 8, -0.5, -0.5)]
    assert found.worst[0] == (1.0, 1, 1)


def test_minus_zero_differs_from_zero(tmp_path):
    """Bytes decide, as everywhere here."""
    found = compared(lines(tmp_path / "a.jsonl", [([1, 2], [0.0])]), lines(tmp_path / "b.jsonl", [([1, 2], [-0.0])]))
    assert (found.status, found.nonzero, found.max_abs) == (1, 1, 0.0)


def test_quantiles_and_trend_of_many(tmp_path):
    draw = random.Random(3)
    tokens = [[draw.randrange(700) for _ in range(draw.randrange(200, 900))] for _ in range(30)]
    size = [[1e-4 * at * draw.random() for at in range(1, len(sequence))] for sequence in tokens]
    a = lines(tmp_path / "a.jsonl", [(t, [-1.0 for _ in s]) for t, s in zip(tokens, size, strict=True)])
    b = lines(tmp_path / "b.jsonl", [(t, [-1.0 - x for x in s]) for t, s in zip(tokens, size, strict=True)])
    found = compared(a, b)
    true = np.concatenate([np.abs(np.float32(-1.0) - (-1.0 - np.array(s)).astype(np.float32)) for s in size])
    for name, q in (("50%", 0.5), ("99%", 0.99)):
        exact = np.sort(true)[math.ceil(q * len(true)) - 1]
        assert exact * 0.992 <= found.quantiles[name] <= exact
    assert found.growth > 3
    assert sum(row[2] for row in found.by_position) == sum(row[2] for row in found.by_sequence) == found.tokens == len(true)
    assert len(found.by_position) <= 128 and len(found.by_sequence) == 30


DUMP = {"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 7, "acc": True}
"""What verl's trainer writes for a sample: text, and what the reward function returned."""


@pytest.mark.parametrize("version", ["0.4.1, 0.5.0", "0.6.1, 0.7.0"])
def test_a_line_verl(version, tmp_path):
    line = {name: value for name, value in DUMP.items() if name != "gts" or version.startswith("0.6")}
    plain = tmp_path / "7.jsonl"
    plain.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="7.jsonl, line 1: a rollout dump of verl, which holds text and scores but no log-probabilities. Let the reward"):
        compared(plain, plain)

    ids = {"responses": [4, 5, 0, 0], "response_mask": [1, 1, 0, 0]}
    logprobs = {"rollout_log_probs": [-1.0, -2.0, 0.0, 0.0], "old_log_probs": [-1.0, -2.5, 0.0, 0.0]}
    for step in (2, 10):  # a folder is read by number
        (tmp_path / "dump").mkdir(exist_ok=True)
        (tmp_path / "dump" / f"{step}.jsonl").write_text(json.dumps(line | ids | logprobs | {"step": step}) + "\n")
    dump = tmp_path / "dump"
    with pytest.raises(ValueError, match="several log-probabilities"):
        compared(dump, dump)
    found = compared(dump, dump, field_a="old_log_probs", field_b="rollout_log_probs")
    assert (found.sequences, found.tokens, found.nonzero, found.max_abs) == (2, 4, 2, 0.5)


def test_a_side_without_prompts(tmp_path):
    """Responses alone against whole sequences: compared from the end."""
    whole = lines(tmp_path / "a.jsonl", [([1, 2, 3, 4], [None, -1.0, -2.0, -3.0])])
    response = lines(tmp_path / "b.jsonl", [([3, 4], [-2.0, -3.5])])
    for pair in ((whole, response), (response, whole)):
        found = compared(*pair)
        assert (found.tokens, found.nonzero, found.max_abs, found.first.token) == (2, 1, 0.5, 4)


def test_sides_that_score_another_number_of_tokens_are_said(tmp_path):
    """One log-probability short: laid side by side from the end, and said so."""
    tokens, values = list(range(1, 11)), [-0.5 * at for at in range(1, 10)]
    a = lines(tmp_path / "a.jsonl", [([1, 2], [-1.0]), (tokens, values)])
    b = lines(tmp_path / "b.jsonl", [([1, 2], [-1.0]), (tokens, values[:-1])])
    found = compared(a, b)
    assert found.uneven == 1 and len(found.notes) == 2 and found.nonzero == 8
    assert found.notes[0] == "A scores 9 tokens of sequence 1, B 8; compared: the last 8, aligned at the end"
    assert found.notes[1].startswith("B's list stands 1 place later than A's in 1 of 2 sequences")
    assert found.to_json()["notes"] == found.notes
    said = CliRunner().invoke(app, ["logdiff", str(a), str(b)]).output
    assert "A scores 9 tokens of sequence 1, B 8" in " ".join(said.replace("│", " ").split())
    many = compared(lines(tmp_path / "c.jsonl", [(tokens, values)] * 9), lines(tmp_path / "d.jsonl", [(tokens, values[1:])] * 9))
    assert (many.uneven, len(many.notes), many.nonzero) == (9, 4, 0) and many.notes[-1].startswith("6 more sequences")
    assert not compared(a, a).notes


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])
    return path


def recorded(path):
    Recording.of([[5, 6, 7, 8], [9, 9]], [1, 1], [[-1.0, -2.0, -0.5], [-0.25]]).save(path)
    return path


def safe(path, **changed):
    tensors = {"tokens": torch.tensor([5, 6, 7, 8]), "logprobs": torch.tensor([-1.0, -2.0, -0.5])} | changed
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return path


def text(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


BAD = {
    "missing": (lambda p: p / "nothing.jsonl", "no such file"),
    "empty": (lambda p: text(p / "x", ""), "an empty file"),
    "picture": (lambda p: text(p / "x", b"\x89PNG\r\n\x1a\n"), "neither JSONL, safetensors nor npz"),
    "pickle": (lambda p: text(p / "x", b"\x80\x04\x95abc"), "a pickle, which is not read"),
    "cut JSONL": (lambda p: cut(lines(p / "x.jsonl", PLAIN)), "line 2: the file is cut off"),
    "not JSON": (lambda p: text(p / "x.jsonl", '{"tokens": [1}\n'), "line 1: it is no JSON"),
    "a list": (lambda p: text(p / "x.jsonl", '{"tokens": [5, 6, 7, 8], "logprobs": [-1, -2, -0.5]}\n[1]\n'), "line 2: a JSON object was expected"),
    "text as number": (lambda p: text(p / "x.jsonl", '{"tokens": [1, 2], "logprobs": ["x"]}'), "'logprobs'.0. is 'x', no number"),
    "cut npz": (lambda p: cut(recorded(p / "x.npz")), "a damaged or cut off npz"),
    "cut safetensors": (lambda p: cut(safe(p / "x.safetensors")), "the file is cut off"),
    "no log-probabilities": (lambda p: safe(p / "x.safetensors", logprobs=None), "needs token ids .* and log-probabilities"),
    "float tokens": (lambda p: safe(p / "x.safetensors", tokens=torch.ones(4)), "token ids of type float32"),
    "NaN": (lambda p: lines(p / "x.jsonl", [([5, 6, 7, 8], [-1.0, math.nan, -0.5])]), "line 1: the log-probability of token 2 is nan"),
    "infinite": (lambda p: lines(p / "x.jsonl", [([5, 6, 7, 8], [-1.0, -math.inf, -math.inf])]), "of token 2 is -inf .2 such tokens"),
    "probability": (lambda p: lines(p / "x.jsonl", [([5, 6, 7, 8], [0.5, 0.4, 0.3])]), "of token 1 is 0.5"),
    "other tokens": (lambda p: lines(p / "x.jsonl", [([5, 6, 3, 8], [-1, -2, -0.5])]), "sequence 0 holds other tokens: token 2 is 7 in A and 3 in B"),
    "other length": (lambda p: lines(p / "x.jsonl", [([5, 6, 7], [-1, -2])]), "sequence 0 has 4 tokens in A and 3 in B"),
    "fewer sequences": (lambda p: lines(p / "x.jsonl", PLAIN[:1]), "A has more sequences than B, which ends after 1"),
    "too many": (lambda p: lines(p / "x.jsonl", [([5], [-1.0, -2.0])]), "2 log-probabilities for 1 tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, tmp_path):
    make, says = BAD[case]
    good = lines(tmp_path / "good.jsonl", PLAIN)
    with pytest.raises(ValueError, match=says):
        compared(good, make(tmp_path))


def test_objects_in_an_npz_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", tokens=np.array([object()], dtype=object), logprobs=np.zeros(1, dtype=np.float32))
    with pytest.raises(ValueError, match="holds Python objects, which are pickled and not read"):
        list(read_scored(tmp_path / "x.npz"))
