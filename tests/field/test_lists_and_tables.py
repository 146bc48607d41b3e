"""What ``tio logdiff`` says of lists that are shifted, filtered or padded; and tables whose words can be copied in 80 columns."""

import io
import json
import os
import re
import sys

import numpy as np
import pytest
from rich.console import Console

from tio_megatron.commands.tables import show_rows
from tio_megatron.files.whole import write_whole
from tio_megatron.verify.logdiff import logdiff
from tio_megatron.verify.readers import read_scored
from tio_megatron.verify.readers.scored import Scored


def sequences(values, where):
    return [Scored(np.arange(len(one)), np.float32(one), where) for one in values]


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_a_list_that_is_shifted_is_said_to_be(by, noise):
    made = np.random.default_rng(0)
    a = [-made.gamma(1.0, 2.0, 40) for _ in range(3)]
    b = [np.minimum(np.roll(one, by) + noise * made.standard_normal(40), 0) for one in a]
    notes = " ".join(logdiff(sequences(a, "a"), sequences(b, "b")).notes)
    way = f"{abs(by)} place{'s' * (abs(by) > 1)} {'later' if by > 0 else 'earlier'} than A's in 3 of 3 sequences"
    assert way in notes


def test_a_list_of_another_length_is_said_to_be_shifted_in_spite_of_noise():
    made = np.random.default_rng(2)
    a = -made.gamma(1.0, 2.0, 40)
    b = np.minimum(a + 1e-3 * made.standard_normal(40), 0)[:-1]
    uneven, shifted = logdiff(sequences([a], "a"), [Scored(np.arange(40), np.float32(b), "b")]).notes
    assert uneven.startswith("A scores 40 tokens of sequence 0, B 39") and "1 place later than A's in 1 of 1 sequences" in shifted


CERTAIN = np.full(40, -1e-6)
"""Of a model that is sure of every token: nearly all differences of two such lists are 0, wherever they are laid."""


@pytest.mark.parametrize("at", [0, 39])
def test_lists_that_merely_differ_are_not_shifted(at):
    made = np.random.default_rng(1)
    a, b = ([-made.gamma(1.0, 2.0, 40) for _ in range(3)] for _ in range(2))
    assert not logdiff(sequences(a, "a"), sequences(b, "b")).notes
    other = CERTAIN.copy()
    other[at] = -3.0  # the first or the last token alone, which a move would push over the end
    for pair in ((CERTAIN, other), (other, CERTAIN)):
        assert not logdiff(*(sequences([one], "x") for one in pair)).notes


def test_minus_infinity_is_the_logarithm_of_0(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"tokens": [5, 6], "logprobs": [-1.0, -Infinity]}\n')
    with pytest.raises(ValueError, match="is -inf; the logarithm of 0: top-k, top-p or min-p left the token out"):
        list(read_scored(tmp_path / "x.jsonl"))


def test_padding_without_a_mask_is_refused(tmp_path):
    entry = {"responses": [4, 5, 0, 0], "rollout_log_probs": [-1.0, -2.0, 0.0, 0.0]}
    (tmp_path / "x.jsonl").write_text(json.dumps(entry))
    with pytest.raises(ValueError, match="'responses' is padded and no mask says which ids are tokens"):
        list(read_scored(tmp_path / "x.jsonl"))
    (tmp_path / "x.jsonl").write_text(json.dumps(entry | {"response_mask": [1, 1, 0, 0]}))
    assert len(next(iter(read_scored(tmp_path / "x.jsonl"))).tokens) == 2


def test_a_padded_table_without_mask_or_lengths_is_refused(tmp_path):
    arrays = {"tokens": np.array([[4, 5, 0, 0], [6, 7, 8, 9]]), "logprobs": np.float32([[-1, -2, 0, 0], [-1, -2, -3, -4]])}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match="x.npz, sequence 0: the last 2 tokens are all 0 with the log-probability 0.0, as padding is"):
        list(read_scored(tmp_path / "x.npz"))
    np.savez(tmp_path / "x.npz", **arrays, lengths=np.array([2, 4]))
    assert [len(one.tokens) for one in read_scored(tmp_path / "x.npz")] == [2, 4]


WORDS = ("--use-rotary-position-embeddings", "tensor-parallel-size", "0.123456789")
ROW = ("bad", "options", f"trainer: {WORDS[0]} and {WORDS[1]} say {WORDS[2]}; " * 3, f"leave {WORDS[0]} out, or {WORDS[1]}")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_word_of_a_table_is_cut(width):
    out = io.StringIO()
    show_rows(Console(file=out, width=width, force_terminal=True, color_system=None), ("", "topic", "found", "what works"), [ROW], styles=["red"])
    words = re.split(r"[\s│┃]+", out.getvalue())
    assert all(word.strip(";,") in {one.strip(";,") for one in words} for cell in ROW for word in cell.split())


COSTS = (
    "sum of input gradient of qkv over tensor-parallel ranks",
    "first stage",
    "18.0 MiB",
    "753.2 MiB",
    "1.50",
    "maximum and target are gathered, the sum is",
)


@pytest.mark.parametrize("width", range(73, 140, 3))
def test_a_table_keeps_its_borders(width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    show_rows(console, ("what", "per", "ours", "stock", "ratio", "why"), [COSTS])
    lines = out.getvalue().splitlines()
    assert {len(line) for line in lines} == {len(lines[0])} and all(line[-1] in "┓┃┩│┘" for line in lines)


def test_a_row_is_a_line_in_a_file():
    out = io.StringIO()
    show_rows(Console(file=out, width=80), ("", "topic", "found", "what works"), [ROW, ROW])
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    (tmp_path / f".report.json.draft-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: .*report.json"):
        write_whole(tmp_path / "report.json", b"x" * 10)
    assert not list(tmp_path.iterdir()), "nothing is left"
