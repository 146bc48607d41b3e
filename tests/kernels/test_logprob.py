"""Log-softmax parts: the reference's bytes, any cut of the vocabulary, padding that never counts."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.contract import VocabOrder
from tio_megatron.kernels.exact import chain_sum, tree_sum
from tio_megatron.kernels.logprob import entropy, entropy_backward, gather_logprob, log_softmax, logprob_backward, reference, vocab_max, vocab_sumexp
from tio_megatron.kernels.math import reference as m
from tio_megatron.testing import assert_same_bytes, first_mismatch


@pytest.mark.parametrize("vocab, runs", [(1, 1), (500, 8), (1000, 2), (1024, 8), (4100, 4)])
def test_bytes_are_the_references(isa: str, vocab: int, runs: int) -> None:
    order, tokens = VocabOrder(vocab, runs), 3
    x = torch.randn(tokens, vocab) * 4
    top = vocab_max(x, vocab)
    assert_same_bytes(top, reference.vocab_max(x, vocab))
    total = vocab_sumexp(x, top, order, 0, vocab)
    assert_same_bytes(total, reference.vocab_sumexp(x, top, order, 0, order.padded))
    y = log_softmax(x, order)
    assert_same_bytes(y, reference.log_softmax(x, order))
    target, d = torch.randint(0, vocab, (tokens,)), torch.randn(tokens)
    one = gather_logprob(x.gather(1, target[:, None]).squeeze(1), top, total[0])
    assert_same_bytes(one, y.gather(1, target[:, None]).squeeze(1))
    assert_same_bytes(logprob_backward(d, x, top, total[0], target, vocab), reference.logprob_backward(d, x, top, total[0], target, vocab))


@pytest.mark.parametrize("vocab, runs", [(1, 1), (500, 8), (4100, 4)])
def test_entropy_is_the_references(isa: str, vocab: int, runs: int) -> None:
    order, tokens = VocabOrder(vocab, runs), 3
    x, d = torch.randn(tokens, vocab) * 8, torch.randn(tokens)
    x[1, 1:] = -float("inf")
    top = vocab_max(x, vocab)
    total, weighted = (vocab_sumexp(x, top, order, 0, vocab, weighted=w)[0] for w in (False, True))
    assert_same_bytes(weighted, reference.vocab_sumexp(x, top, order, 0, order.padded, weighted=True)[0])
    assert_same_bytes(entropy(total, weighted), reference.entropy(total, weighted))
    assert entropy(total, weighted)[1] == 0, "one certain token"
    assert_same_bytes(entropy_backward(d, x, top, total, weighted, vocab), reference.entropy_backward(d, x, top, total, weighted, vocab))


@pytest.mark.parametrize("vocab", [500, 2000])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_any_tensor_parallel_size_gives_the_same_bytes(isa: str, vocab: int, tp: int) -> None:
    """Pain 17: shards are padded, the padding holds NaN, and still every size gives the bytes of whole rows."""
    order = VocabOrder(vocab, 8)
    x = torch.randn(4, vocab) * 4
    padded = torch.cat([x, torch.full((4, order.padded - vocab), float("nan"))], 1)
    rows = order.padded // tp
    bounds = [(r * rows, (r + 1) * rows) for r in range(tp)]
    tops = [vocab_max(padded[:, lo:hi], max(0, min(hi, vocab) - lo)) for lo, hi in bounds]
    top = torch.stack(tops).amax(0)
    partials = [dict(zip(order.frontier(lo, hi), vocab_sumexp(padded[:, lo:hi], top, order, lo, hi), strict=True)) for lo, hi in bounds]
    total = order.tree.combine(partials)
    whole = log_softmax(x, order)
    assert_same_bytes(gather_logprob(x, top[:, None].expand_as(x), total[:, None].expand_as(x)), whole)
    assert_same_bytes(log_softmax(padded, order), whole)
    assert all(set(partial) == set(order.frontier(lo, hi)) and len(partial) == 1 for partial, (lo, hi) in zip(partials, bounds, strict=True))


def test_other_orders_and_counted_padding_differ() -> None:
    order = VocabOrder(2000, 8)
    x = torch.randn(20, 2000) * 2
    top = vocab_max(x, 2000)
    e = m.exp(x - top[:, None])
    total = vocab_sumexp(x, top, order, 0, 2000)[0]
    assert first_mismatch(total, chain_sum(e)), "one chain over the vocabulary"
    assert first_mismatch(total, chain_sum(torch.stack([chain_sum(p) for p in e.split(128, 1)], 1))), "blocks one after another"
    assert first_mismatch(total, tree_sum(torch.stack([chain_sum(p) for p in e.split(256, 1)]))), "blocks of 256"
    counted = log_softmax(torch.cat([x, torch.zeros(20, 48)], 1), VocabOrder(2048, 8))[:, :2000]
    assert first_mismatch(counted, log_softmax(x, order)), "padding counted"


def test_a_row_does_not_see_its_batch_and_nan_stays(isa: str) -> None:
    order = VocabOrder(700, 4)
    x = torch.randn(9, 700)
    x[4, 650] = float("nan")
    whole = log_softmax(x, order)
    assert whole[4].isnan().all() and not whole[:4].isnan().any() and not whole[5:].isnan().any()
    for rows in ([0], [8, 2], [5, 6, 7]):
        assert_same_bytes(log_softmax(x[rows], order), whole[rows])
    strided = torch.randn(9, 1000)[:, :700]
    assert_same_bytes(log_softmax(strided, order), log_softmax(strided.contiguous(), order))


def test_extremes(isa: str) -> None:
    order = VocabOrder(3, 1)
    x = torch.tensor([[0.0, -0.0, -200.0], [-float("inf"), 1.0, 1.0], [3e38, -3e38, 0.0]])
    assert_same_bytes(log_softmax(x, order), reference.log_softmax(x, order))
    assert_same_bytes(vocab_max(torch.tensor([[-0.0, -1.0], [float("nan"), -5.0]]), 2), torch.tensor([0.0, -5.0]))
    assert_same_bytes(vocab_max(torch.full((2, 4), float("nan")), 0), torch.full((2,), -float("inf")))
    assert log_softmax(torch.empty(0, 3), order).shape == (0, 3)


def test_target_elsewhere_and_refusals() -> None:
    x, d = torch.randn(2, 6), torch.ones(2)
    top, total = torch.zeros(2), torch.full((2,), 10.0)
    grad = logprob_backward(d, x, top, total, torch.tensor([-1, 5]), 4)
    assert_same_bytes(grad, reference.logprob_backward(d, x, top, total, torch.tensor([-1, 5]), 4))
    assert (grad[:, :4] < 0).all()
    assert_same_bytes(grad[:, 4:], torch.zeros(2, 2))
    with pytest.raises(ValueError, match="start of a block"):
        vocab_sumexp(torch.ones(1, 300), torch.ones(1), VocabOrder(1000, 1), 100, 256)
    with pytest.raises(ValueError, match="1000 true columns, but logits has 6"):
        log_softmax(x, VocabOrder(1000, 1))
