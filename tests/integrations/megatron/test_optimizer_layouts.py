"""Given the same gradients, Adam gives the same weights, main parameters and moments in every layout, and the norm is one number."""

import math
from functools import cache

import pytest
from hand_made import Row, gradients, run

from tio_megatron.testing import assert_same_bytes, first_mismatch

ROWS = [
    Row(dp=2),
    Row(dp=2, sharded=True),
    Row(tp=2),
    Row(tp=2, ep=2, sharded=True),
    Row(ep=2, dp=2, grouped=False),
    Row(ep=2, dp=2, sharded=True, dtype="float32"),
    Row(tp=2, pp=2, ep=2, dp=1, tied=True),
    pytest.param(Row(tp=2, dtype="float32"), marks=pytest.mark.full),
    pytest.param(Row(tp=2, etp=2, dtype="float32"), marks=pytest.mark.full),
    pytest.param(Row(etp=2, dp=2), marks=pytest.mark.full),
    pytest.param(Row(pp=2, dp=2, sharded=True, tied=True), marks=pytest.mark.full),
    pytest.param(Row(tp=2, ep=4, dp=2, sharded=True), marks=pytest.mark.full),
    pytest.param(Row(tp=2, ep=2, dp=2), marks=pytest.mark.full),
    pytest.param(Row(dp=4, ep=2, sharded=True, dtype="float32"), marks=pytest.mark.full),
]


@cache
def alone(dtype, tied):
    return run(Row(dtype=dtype, tied=tied))


@cache
def exact_norm(seed, dtype, tied):
    """float64 holds the square of an fp32 number, and ``fsum`` rounds once."""
    return math.sqrt(math.fsum(x for g in gradients(seed, dtype, tied).values() for x in (g.double() ** 2).flatten().tolist()))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_steps_give_the_bytes_of_one_rank(row):
    norms, found = run(row)
    wanted_norms, wanted = alone(row.dtype, row.tied)
    assert_same_bytes(norms, wanted_norms, "norms")
    for kind in wanted:
        assert_same_bytes(found[kind], wanted[kind], kind)
    assert norms[0] > 1.0, "clipping is active"


@pytest.mark.parametrize("tied", [False, True])
def test_the_norm_counts_each_parameter_once(tied):
    norms, found = alone("bfloat16", tied)
    assert norms[0] == exact_norm(0, "bfloat16", tied)
    assert first_mismatch(found["param"], {name: weight.float() for name, weight in found["weight"].items()}), "main parameters hold more than weights"


def test_shards_are_counted_without_initialisation_too():
    """Stock's tags are written while weights are initialised; who loads weights anyway may switch that off."""
    row = Row(tp=2, ep=2, fields=(("perform_initialization", False),))
    assert run(row, steps=1)[0] == alone("bfloat16", False)[0][:1]


def test_stock_gives_another_norm_in_another_layout():
    """Negative control, on the same gradients."""
    one, two = (run(Row(tp=tp, ordered=False), steps=2)[0] for tp in (1, 2))
    assert one != two
    assert one[0] != exact_norm(0, "bfloat16", False)
