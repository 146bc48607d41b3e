"""Training gives the same weights, main parameters and moments however it is cut. ``make matrix-train`` is the long form."""

import pytest
from tiny_megatron import Setup, ddp, on_ranks
from training_rows import CONTRACT, alone, trained

from tio_megatron.contract import Contract, Layout
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, write_tiny
from tio_megatron.testing.ranks import RankError

FULL = pytest.mark.full
ROWS = [
    ("moe", "tp1", dict(micro_batch=4, packed=True, order="by length")),
    ("moe", "tp2+ep2", dict(micro_batch=2)),
    ("moe", "tp2+dp2+ep2+etp2+allgather", dict(distributed_optimizer=True, recompute=True)),
    ("moe", "cp2+ep2", dict(packed=True, micro_batch=2)),
    ("moe tied fp32", "tp2+ep1+etp1", dict(order="interleaved")),
    ("moe tied fp32", "pp2+dp2+ep2", dict(distributed_optimizer=True, overlap=True)),
    ("dense tied", "pp2+tp2", dict(micro_batch=2)),
    ("dense tied", "dp2", dict(overlap=True)),  # a tied embedding in one stage: stock adds to its main_grad, whatever it is told
    ("dense fp32", "tp2+nosp", dict(micro_batch=8)),
    pytest.param("dense fp32", "tp4", dict(packed=True, micro_batch=4), marks=FULL),
    pytest.param("dense tied", "cp2+dp2", dict(order="by length", distributed_optimizer=True), marks=FULL),
    pytest.param("moe tied fp32", "cp2+tp2+ep2", dict(micro_batch=2), marks=FULL),
    pytest.param("moe tied fp32", "pp2+tp2+ep1+etp2", dict(packed=True, micro_batch=2), marks=FULL),
    pytest.param("moe tied fp32", "ep4+allgather", dict(overlap=True), marks=FULL),
    pytest.param("moe", "tp4+ep1+etp1", dict(recompute=True), marks=FULL),
    pytest.param("moe", "cp4+ep1+etp1", dict(micro_batch=2), marks=FULL),  # of one sample alone each of four ranks has one grain: nothing to confuse
    pytest.param("moe", "pp2", dict(packed=True, micro_batch=4), marks=FULL),
]


@pytest.mark.parametrize("model, words, cut", ROWS, ids=str)
def test_the_bytes_of_one_rank(model, words, cut):
    assert_same_bytes(alone(model), trained(model, words, **cut), f"{model}: {words} {cut}")


@pytest.mark.parametrize("plant", ["fp32 sums", "one grain"])
@pytest.mark.parametrize("model, words, cut", [ROWS[1], ROWS[3]] + [pytest.param(*getattr(row, "values", row), marks=FULL) for row in ROWS], ids=str)
def test_a_planted_order_is_caught_on_the_same_row(model, words, cut, plant):
    assert first_mismatch(alone(model), trained(model, words, plant, **cut)) is not None


def test_stock_layouts_differ():
    """Negative control: the same runs by the packages as they are."""
    one, two = (trained("moe", words, ordered=False, grouped=False) for words in ("tp1", "tp2+ep2"))
    assert first_mismatch(one, two) is not None


def test_the_grain_is_part_of_the_contract():
    """Another grain is another sum; the longest sample is one grain under the default."""
    assert first_mismatch(alone("moe"), alone("moe", contract=Contract())) is not None
    assert_same_bytes(alone("moe", contract=Contract()), trained("moe", "tp2+ep2", contract=Contract(), micro_batch=4))
    assert CONTRACT.fingerprint() != Contract().fingerprint()


def test_more_ranks_than_key_value_groups_are_refused(tmp_path):
    path = write_tiny(tmp_path / "model", DENSE, num_key_value_heads=2)
    with pytest.raises(RankError, match=r"tp 4 is above the 2 key/value groups.*tp in \[1, 2\] would work"):
        on_ranks(Setup(path, Layout(tp=4, sp=True)), lambda model, setup: ddp(model) and None)
