"""Recordings survive the disk; a comparison sees one bit, the sign of zero, NaN on one side, and a row that differs elsewhere."""

import numpy as np
import pytest

from tio_megatron.verify import Comparison, Recording, compare


def recording(logprobs=(-1.0, -2.0, -0.5), rows=(b"a" * 16, b"b" * 16, b"c" * 16)) -> Recording:
    return Recording.of([[7, 8, 9], [5, 6]], [2, 1], [logprobs[:2], logprobs[2:]], [rows[:2], rows[2:]] if rows else None)


def test_round_trip(tmp_path):
    ours = recording()
    ours.save(tmp_path / "deep" / "r.npz")
    back = Recording.load(tmp_path / "deep" / "r.npz")
    assert compare(ours, back).same and back.sequences == [[7, 8, 9], [5, 6]] and back.rows.shape == (3, 16)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.npz"]
    assert back.sampled.tolist() == [False, True, True]
    assert [back.where(i) for i in range(3)] == [(0, 1), (0, 2), (1, 1)]


def test_one_bit_is_a_difference():
    other = recording((-1.0, np.nextafter(np.float32(-2.0), np.float32(0)), -0.5))
    found = compare(recording(), other)
    assert (found.tokens, found.sampled, found.nonzero, found.rows_differing, found.same) == (3, 2, 1, 0, False)
    assert found.max_abs == pytest.approx(1.2e-7, rel=0.1) and found.first.startswith("sequence 0, token 2: ") and "c0000000 / bfffffff" in found.first


@pytest.mark.parametrize("value, largest", [(float("nan"), float("inf")), (float("-inf"), float("inf"))])
def test_what_is_no_number(value, largest):
    assert compare(recording(), recording((value, -2.0, -0.5))).max_abs == largest
    found = compare(recording((value, -2.0, -0.5)), recording((value, -2.0, -0.5)))
    assert (found.nonzero, found.nonfinite, found.same) == (0, 1, False) and "no log-probability" in found.first
    assert not (found + compare(recording(), recording())).same


def test_signs_of_zero_differ():
    found = compare(recording((0.0, -2.0, -0.5)), recording((-0.0, -2.0, -0.5)))
    assert (found.nonzero, found.max_abs, found.same) == (1, 0.0, False)


def test_a_row_may_differ_where_the_token_does_not():
    found = compare(recording(), recording(rows=(b"a" * 16, b"b" * 16, b"d" * 16)))
    assert (found.nonzero, found.rows, found.rows_differing, found.same) == (0, 3, 1, False) and "another row" in found.first
    assert compare(recording(rows=None), recording(rows=None)).rows == 0
    with pytest.raises(ValueError, match="on both or on neither"):
        compare(recording(rows=None), recording())


def test_sums_and_refusals():
    total = compare(recording(), recording()) + compare(recording(), recording((-1.0, -2.0, -1.5)))
    assert (total.tokens, total.nonzero, total.max_abs, len(total.differences)) == (6, 1, 1.0, 6)
    assert not Comparison(0, 0, 0, 0.0, 0, 0).same
    with pytest.raises(ValueError, match="different tokens"):
        compare(recording(), Recording.of([[7, 8, 8], [5, 6]], [2, 1], [[-1, -2], [-3]]))
    with pytest.raises(ValueError, match="prompt of at least one token"):
        Recording.of([[7, 8]], [0], [[-1]])
    with pytest.raises(ValueError, match=r"logprobs must be float32 \[1\]"):
        Recording.of([[7, 8]], [1], [[-1, -2]])
