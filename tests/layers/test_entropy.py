"""Entropy of a cut vocabulary: any padding and any number of ranks give the bytes of one rank, forward and backward."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tio_megatron.contract import Contract, VocabOrder
from tio_megatron.kernels.exact import chain_sum
from tio_megatron.kernels.logprob import entropy, reference, vocab_max, vocab_sumexp
from tio_megatron.layers.entropy import vocab_entropy
from tio_megatron.layers.vocab import VocabShard
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

V, S, B = 700, 6, 3
ORDER = Contract().vocab_order(V)
CUTS = [(1, 700), (1, 768), (1, 1024), (2, 384), (2, 512), (4, 256), (4, 384)]
"""Ranks and rows of each."""


def values():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(S, B, V, generator=generator) * 4
    logits[0, 0, 650] = -float("inf")
    logits[2, 1, 3] = float("nan")
    return logits, torch.randn(S, B, generator=generator)


def measure(rank, ranks, rows):
    logits, dy = values()
    padded = torch.full((S, B, ranks * rows), float("nan"))
    padded[..., :V] = logits
    mine = padded[..., rank * rows : (rank + 1) * rows].clone().requires_grad_()
    found = vocab_entropy(mine, VocabShard(ORDER, rows, rank, ranks), group=dist.group.WORLD)
    found.backward(dy)
    return found.detach(), mine.grad


@cache
def results(ranks):
    return run_ranks(ranks, lambda rank: {rows: measure(rank, ranks, rows) for n, rows in CUTS if n == ranks})


@pytest.mark.parametrize("ranks, rows", CUTS)
def test_any_cut(ranks, rows):
    whole, gradient = results(1)[0][V]
    for rank, cuts in enumerate(results(ranks)):
        got, got_gradient = cuts[rows]
        assert_same_bytes(whole, got, f"rank {rank}")
        true = gradient[..., rank * rows : (rank + 1) * rows]
        assert_same_bytes(true, got_gradient[..., : true.shape[-1]], "gradient")
        assert not got_gradient[..., true.shape[-1] :].any(), "padding has no gradient"


def test_nan_stays_in_its_token_and_a_certain_zero_adds_nothing():
    whole, gradient = results(1)[0][V]
    assert whole[2, 1].isnan() and int(whole.isnan().sum()) == 1
    assert gradient[0, 0, 650] == 0 and gradient[0, 0].isfinite().all()


@pytest.mark.parametrize("vocab, runs", [(1, 1), (500, 8), (1000, 2), (4100, 4)])
def test_bytes_are_the_references(vocab, runs):
    order = VocabOrder(vocab, runs)
    x = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)) * 8
    x[0, vocab // 2 :] = -float("inf")
    x[0, 0] = 0.0
    top = vocab_max(x, vocab)
    total, weighted = (reference.vocab_sumexp(x, top, order, 0, order.padded, weighted=w)[0] for w in (False, True))
    d = torch.tensor([1.0, -2.0, 0.3])
    given = x.clone().requires_grad_()
    found = vocab_entropy(given, VocabShard(order, vocab))
    found.backward(d)
    assert_same_bytes(reference.entropy(total, weighted), found.detach())
    assert_same_bytes(reference.entropy_backward(d, x, top, total, weighted, vocab), given.grad)


def test_another_order_differs():
    order = VocabOrder(2000, 8)
    x = torch.randn(20, 2000, generator=torch.Generator().manual_seed(2)) * 4
    top = vocab_max(x, 2000)
    total, weighted = (vocab_sumexp(x, top, order, 0, 2000, weighted=w)[0] for w in (False, True))
    d = x - top[:, None]
    terms = torch.exp(d) * d
    ours = entropy(total, weighted)
    assert_same_bytes(ours, vocab_entropy(x, VocabShard(order, 2000)))
    assert first_mismatch(ours, entropy(total, chain_sum(terms))), "one chain over the vocabulary"
    assert first_mismatch(ours, vocab_entropy(x, VocabShard(VocabOrder(2000, 1, 1024), 2000))), "other blocks"
    padded = torch.cat([x, torch.zeros(20, 48)], 1)
    assert first_mismatch(ours, vocab_entropy(padded, VocabShard(VocabOrder(2048, 8), 2048))), "padding counted"
