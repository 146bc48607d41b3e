"""Dense Qwen3 on stock megatron-core: the bytes of log-probabilities in every layout are those of one rank; stock's differ."""

from functools import cache

import pytest
import torch
from context_plants import ring_merge
from tiny_megatron import Setup, losses, on_ranks, on_ranks_each

from tio_megatron import collectives
from tio_megatron.contract import Contract, Cuts, Layout
from tio_megatron.integrations.megatron import token_logprobs
from tio_megatron.kernels import linear as products
from tio_megatron.layers import context
from tio_megatron.testing import assert_same_bytes, first_mismatch
from tio_megatron.testing.qwen3 import DENSE, ragged, write_tiny

FEEDS = {"together": dict(), "alone": dict(batch=1), "in pairs": dict(batch=2), "packed": dict(packed=True), "packed in pairs": dict(batch=2, packed=True)}
KINDS = {
    "bf16": dict(),
    "fp32": dict(torch_dtype="float32"),
    "bf16 tied": dict(tie_word_embeddings=True),
    "fp32 tied": dict(torch_dtype="float32", tie_word_embeddings=True),
    "bf16 2 groups": dict(num_key_value_heads=2),
}
CI_KINDS = ["bf16", "fp32", "bf16 tied"]
ROWS = {
    Layout(): ["alone", "packed"],
    Layout(tp=2): ["together"],
    Layout(tp=2, sp=True): ["packed"],
    Layout(tp=4): ["in pairs"],
    Layout(tp=4, sp=True): ["together"],
    Layout(pp=2): ["alone"],
    Layout(tp=2, pp=2, sp=True): ["packed in pairs"],
    Layout(cp=2): ["together", "packed in pairs"],
    Layout(tp=2, cp=2, sp=True): ["packed"],
}
"""Layouts, and how each is fed in CI."""
FULL_LAYOUTS = [*ROWS, Layout(tp=2, dp=2), Layout(cp=4), Layout(tp=2, cp=2), Layout(pp=2, cp=2), Layout(cp=2, dp=2)]
SEQUENCES = ragged()
WANTED = [[0, 63, 64, 169], [0], [64], []]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return cache(lambda kind: write_tiny(root / kind, DENSE, **KINDS[kind]))


def scored(folder, layout, kinds, feeds, contract=None):
    """By rank of the last stage: kind and feed -> log-probabilities and the distributions at some positions."""

    def work(model, _):
        found = {}
        for feed in feeds:
            scores = token_logprobs(model, SEQUENCES, rows=WANTED, **FEEDS[feed])
            found[feed] = None if scores is None else (scores.logprobs, scores.rows)
        return found

    setups = [Setup(folder(kind), layout, contract=contract or Contract()) for kind in kinds]
    ranks = [dict(zip(kinds, results, strict=True)) for results in on_ranks_each(setups, work)]
    return [results for results in ranks if results[kinds[0]][feeds[0]] is not None]


@pytest.fixture(scope="session")
def expected(folder):
    """One rank, all sequences in one batch."""
    found = {}

    def of(kind):
        if kind not in found:
            kinds = CI_KINDS if kind in CI_KINDS else list(KINDS)
            found.update({kind: feeds["together"] for kind, feeds in scored(folder, Layout(), kinds, ["together"])[0].items()})
        return found[kind]

    return of


def compare(folder, expected, layout, kinds, feeds):
    for rank, results in enumerate(scored(folder, layout, kinds, feeds)):
        for kind in kinds:
            for feed in feeds:
                assert_same_bytes(expected(kind), results[kind][feed], f"{layout}, {kind}, {feed}, rank {rank}")


@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_same_bytes_as_one_rank(layout, folder, expected):
    assert not any(values.isnan().any() for kind in CI_KINDS for part in expected(kind) for values in part)
    compare(folder, expected, layout, CI_KINDS, ROWS[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", FULL_LAYOUTS, ids=str)
def test_same_bytes_as_one_rank_for_every_kind_and_feed(layout, folder, expected):
    compare(folder, expected, layout, list(KINDS), list(FEEDS))


@pytest.mark.parametrize("layout", [layout for layout in ROWS if layout.tp > 1 or layout.cp > 1], ids=str)
def test_a_planted_order_is_caught_on_the_same_row(layout, folder, expected, monkeypatch):
    """CP: partial softmaxes merged in ring order. TP 4: partial sums added rank after rank. TP 2, where two terms commute: one leaf per rank
    instead of the contract's."""
    if layout.cp > 1:
        monkeypatch.setattr(context, "attention", ring_merge(layout.cp))
    elif layout.tp > 2:
        monkeypatch.setattr(collectives, "all_reduce", rank_after_rank)
        monkeypatch.setattr(collectives, "reduce_scatter", rank_after_rank_scattered)
    else:
        product = products.linear
        monkeypatch.setattr(products, "linear", lambda x, w, *, leaves, out_dtype=None: product(x, w, leaves=1, out_dtype=out_dtype))
    feed = ROWS[layout][-1]
    got = scored(folder, layout, CI_KINDS, [feed])[0]
    for kind in CI_KINDS:
        assert first_mismatch(expected(kind), got[kind][feed]) is not None, kind


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


@pytest.fixture(scope="module")
def through_the_loss(tmp_path_factory):
    """Losses per token in bf16 and fp32. A vocabulary of 1024 pads alike everywhere, so that only sums can differ in stock."""
    root = tmp_path_factory.mktemp("control")
    paths = [write_tiny(root / dtype, DENSE, torch_dtype=dtype, vocab_size=1024) for dtype in ("bfloat16", "float32")]

    @cache
    def run(layout, ordered):
        setups = [Setup(path, layout, ordered=ordered, padding=0.0) for path in paths]
        return next(found for found in on_ranks_each(setups, lambda model, _: losses(model, [TOKENS])) if found[0] is not None)

    return run


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(tp=4, sp=True), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_stock_differs_and_ours_does_not_through_the_loss(layout, through_the_loss):
    """The stock control: the same models, tokens and loss, unpatched."""
    assert_same_bytes(through_the_loss(Layout(), True), through_the_loss(layout, True))
    for one, other in zip(through_the_loss(Layout(), False), through_the_loss(layout, False), strict=True):
        assert first_mismatch(one, other) is not None


def test_the_loss_is_minus_the_score(folder, expected):
    tokens = torch.tensor([SEQUENCES[0]])
    loss = on_ranks(Setup(folder("bf16"), Layout(tp=2)), lambda model, _: losses(model, [tokens]))[0]
    assert_same_bytes(-loss[0], expected("bf16")[0][0])


def test_other_cuts_are_another_order(folder, expected):
    """The contract decides: fewer leaves give other bytes on one rank."""
    assert first_mismatch(expected("fp32"), scored(folder, Layout(), ["fp32"], ["together"], Contract(cuts=Cuts.uniform(1)))[0]["fp32"]["together"]) is not None


def test_temperature_divides_the_logits(folder):
    def run(model, _):
        scores = [token_logprobs(model, SEQUENCES[2:3], temperature=t, rows=[[5]]) for t in (1.0, 0.7)]
        return [(score.logprobs, score.rows) for score in scores]

    one, other = (on_ranks(Setup(folder("fp32"), layout), run)[-1] for layout in (Layout(), Layout(tp=4, sp=True)))
    assert_same_bytes(one, other)
    assert first_mismatch(*one) is not None


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
