"""Dense Qwen3 on stock megatron-core: the bytes of log-probabilities in every layout are those of one rank; stock's differ."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from tiny_megatron import Setup, last_stage, losses, on_ranks

from tio_megatron import collectives
from tio_megatron.contract import Contract, Cuts, Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.kernels import linear as products
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, ragged, write_tiny


@dataclass(frozen=True)
class Row:
    """A layout and a way of feeding it. ``batch`` and ``packed`` are arguments of ``token_logprobs``."""

    layout: Layout
    feed: dict = field(default_factory=dict)
    marks: tuple = ()

    def __str__(self):
        return f"{self.layout} " + " ".join(f"{key}={value}" for key, value in self.feed.items())


FULL = (pytest.mark.full,)
ROWS = [
    Row(Layout(), dict(batch=1)),
    Row(Layout(), dict(packed=True)),
    Row(Layout(tp=2)),
    Row(Layout(tp=2, sp=True), dict(packed=True)),
    Row(Layout(tp=4), dict(batch=1), FULL),
    Row(Layout(tp=4, sp=True), dict(batch=2)),
    Row(Layout(tp=4, sp=True), dict(packed=True), FULL),
    Row(Layout(pp=2), dict(batch=1)),
    Row(Layout(pp=2), dict(batch=2, packed=True), FULL),
    Row(Layout(tp=2, pp=2, sp=True), dict(batch=2)),
    Row(Layout(tp=2, pp=2, sp=True), dict(batch=2, packed=True), FULL),
    Row(Layout(tp=2, dp=2), dict(), FULL),
]
KINDS = {
    "bf16": dict(),
    "fp32": dict(torch_dtype="float32"),
    "bf16 tied": dict(tie_word_embeddings=True),
    "fp32 tied": dict(torch_dtype="float32", tie_word_embeddings=True),
    "bf16, 2 key/value heads": dict(num_key_value_heads=2),
}
IN_CI = {"bf16", "fp32", "bf16 tied"}
SEQUENCES = ragged()
WANTED = [[0, 63, 64, 169], [0], [64], []]


def parameters(rows=ROWS):
    for kind in KINDS:
        for row in rows:
            marks = row.marks if kind in IN_CI and (kind != "bf16 tied" or row.layout.tp == 4 or row.layout.pp > 1) else FULL
            yield pytest.param(kind, row, id=f"{kind}-{row}", marks=marks)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return cache(lambda kind: write_tiny(root / kind.replace("/", " "), DENSE, **KINDS[kind]))


def score(model, setup, feed):
    scores = token_logprobs(model, SEQUENCES, rows=WANTED, **feed)
    return None if scores is None else (scores.logprobs, scores.rows)


def scored(path, row, contract=None):
    setup = Setup(path, row.layout, contract=contract or Contract())
    return last_stage(on_ranks(setup, lambda model, _: score(model, _, row.feed)))


@pytest.fixture(scope="session")
def expected(folder):
    return cache(lambda kind: scored(folder(kind), Row(Layout()))[0])


@pytest.mark.parametrize("kind, row", list(parameters()))
def test_same_bytes_as_one_rank(kind, row, folder, expected):
    for rank, got in enumerate(scored(folder(kind), row)):
        assert_same_bytes(expected(kind), got, f"{row}, rank {rank}")
    assert not any(values.isnan().any() for part in expected(kind) for values in part)


@pytest.mark.parametrize("kind, row", list(parameters([row for row in ROWS if row.layout.tp > 1 and row.layout.dp == 1])))
def test_a_planted_order_is_caught_on_the_same_row(kind, row, folder, expected, monkeypatch):
    """TP 4: partial sums added rank after rank. TP 2, where two terms commute: one leaf per rank instead of the contract's."""
    if row.layout.tp > 2:
        monkeypatch.setattr(collectives, "all_reduce", rank_after_rank)
        monkeypatch.setattr(collectives, "reduce_scatter", rank_after_rank_scattered)
    else:
        product = products.linear
        monkeypatch.setattr(products, "linear", lambda x, w, *, leaves, out_dtype=None: product(x, w, leaves=1, out_dtype=out_dtype))
    assert first_mismatch(expected(kind), scored(folder(kind), row)[0]) is not None


def rank_after_rank(x, group, *, out_dtype=None):
    parts = collectives.all_gather(x[None].contiguous(), group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(out_dtype or x.dtype)


def rank_after_rank_scattered(x, group, *, splits=None, out_dtype=None):
    total = rank_after_rank(x, group, out_dtype=out_dtype)
    return total.split(splits or [len(x) // group.size()] * group.size())[group.rank()]


TOKENS = torch.randint(700, (2, 161), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(tp=4, sp=True), Layout(tp=2, pp=2, sp=True)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stock_differs_and_ours_does_not_through_the_loss(dtype, layout, tmp_path):
    """The stock control: the same model, tokens and loss, unpatched. A vocabulary of 1024 pads alike everywhere, so only sums can differ."""
    path = write_tiny(tmp_path / "model", DENSE, torch_dtype=dtype, vocab_size=1024)

    def run(layout, ordered):
        setup = Setup(path, layout, ordered=ordered, padding=0.0)
        return last_stage(on_ranks(setup, lambda model, _: losses(model, [TOKENS])))[0]

    assert_same_bytes(run(Layout(), True), run(layout, True))
    assert first_mismatch(run(Layout(), False), run(layout, False)) is not None


def test_the_loss_is_minus_the_score(folder, expected):
    tokens = torch.tensor([SEQUENCES[0]])
    loss = on_ranks(Setup(folder("bf16"), Layout(tp=2)), lambda model, _: losses(model, [tokens]))[0]
    assert_same_bytes(-loss[0], expected("bf16")[0][0])


def test_other_cuts_are_another_order(folder, expected):
    """The contract decides: fewer leaves give other bytes on one rank."""
    assert first_mismatch(expected("fp32"), scored(folder("fp32"), Row(Layout()), Contract(cuts=Cuts.uniform(1)))[0]) is not None


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, sp=True)], ids=str)
def test_temperature_divides_the_logits(layout, folder):
    def run(model, _):
        return [token_logprobs(model, SEQUENCES[:1], temperature=t, rows=[[5]]) for t in (1.0, 0.7)]

    one = on_ranks(Setup(folder("fp32")), run)[0]
    assert_same_bytes([s.logprobs for s in one], [s.logprobs for s in on_ranks(Setup(folder("fp32"), layout), run)[-1]])
    assert_same_bytes([s.rows for s in one], [s.rows for s in on_ranks(Setup(folder("fp32"), layout), run)[0]])
    assert first_mismatch(one[0].logprobs, one[1].logprobs) is not None


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_padding_and_neighbours_do_not_move_a_sequence(layout, folder, expected):
    """Row 0 scored alone, beside others, and before a NaN-free tail of padding: the same bytes."""
    alone = last_stage(on_ranks(Setup(folder("bf16"), layout), lambda model, _: token_logprobs(model, SEQUENCES[2:3]).logprobs))[0]
    assert_same_bytes(alone[0], expected("bf16")[0][2])


WRONG = [([], {}), ([[]], {}), ([[1, 700]], {}), ([[1]], dict(rows=[[1]])), ([[1, 2]], dict(temperature=0.0))]


def test_what_is_refused_when_scoring(folder):
    def run(model, _):
        said = []
        for sequences, arguments in WRONG:
            with pytest.raises(ValueError) as error:
                token_logprobs(model, sequences, **arguments)
            said.append(str(error.value))
        return said

    empty, hollow, outside, position, temperature = on_ranks(Setup(folder("bf16")), run)[0]
    assert "at least one sequence" in empty and "at least one token" in hollow
    assert "id 700" in outside and "vocabulary of 700" in outside
    assert "positions [1]" in position and "temperature" in temperature
