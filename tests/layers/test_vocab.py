"""Cut over the vocabulary: any padding and any number of ranks give the bytes of one rank, and padding rows may hold NaN."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tio_megatron.contract import Contract, VocabOrder
from tio_megatron.kernels import linear
from tio_megatron.layers.vocab import VocabShard, at_temperature, vocab_embedding, vocab_logits, vocab_logprob, vocab_logprob_rows
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

V, H, S, B = 700, 32, 8, 3
DTYPES = (torch.bfloat16, torch.float32)
ORDER = Contract().vocab_order(V)
CUTS = [(1, 700), (1, 768), (1, 1024), (2, 384), (2, 512), (4, 256), (4, 384)]
"""Ranks and rows of each: what Megatron pads to for TP 1, 2 and 4, and more."""


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=generator)
    weight[5, 3] = -0.0
    ids = torch.randint(V, (S, B), generator=generator)
    ids[0, 0], ids[7, 2] = 5, 699
    return weight, ids, torch.randn(S, B, H, generator=generator), torch.randn(S, B, generator=generator)


def shard_of(weight, ranks, rows, rank):
    padded = torch.full((ranks * rows, *weight.shape[1:]), float("nan"), dtype=weight.dtype)
    padded[:V] = weight
    return padded[rank * rows : (rank + 1) * rows].clone(), VocabShard(ORDER, rows, rank, ranks)


def embed(rank, ranks, rows, sp, dtype):
    weight, ids, dy, _ = values()
    own, shard = shard_of(weight.to(dtype), ranks, rows, rank)
    own.requires_grad_()
    y = vocab_embedding(ids, own, shard, group=dist.group.WORLD, sequence_parallel=sp)
    y.backward((dy.chunk(ranks)[rank] if sp and ranks > 1 else dy).to(dtype))
    return y.detach(), own.grad


@cache
def results(ranks):
    """By rank, one start for all: (rows, sequence parallel, dtype) -> embedding and its gradient; rows -> scores and gradients."""

    def everything(rank):
        embedded = {(n, sp, dtype): embed(rank, ranks, n, sp, dtype) for r, n in CUTS if r == ranks for sp in (False, True) for dtype in DTYPES}
        return embedded, {n: score(rank, ranks, n) for r, n in CUTS if r == ranks}

    return run_ranks(ranks, everything)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("ranks, rows, sp", [(ranks, rows, sp) for ranks, rows in CUTS for sp in (False, True) if ranks > 1])
def test_embedding_is_moved(ranks, rows, sp, dtype):
    weight, ids, _, _ = values()
    expected = weight.to(dtype)[ids]
    alone, dw = results(1)[0][0][V, False, dtype]
    assert_same_bytes(expected, alone, "-0 stays -0")
    for rank, (embedded, _) in enumerate(results(ranks)):
        y, dw_part = embedded[rows, sp, dtype]
        assert_same_bytes(expected.chunk(ranks)[rank] if sp else expected, y, f"rank {rank}")
        true = dw[rank * rows : min(V, (rank + 1) * rows)]
        assert_same_bytes(true, dw_part[: len(true)], "gradient")
        assert not dw_part[len(true) :].any()


def score(rank, ranks, rows):
    weight, target, x, dy = values()
    own, shard = shard_of(weight, ranks, rows, rank)
    x.requires_grad_()
    own.requires_grad_()
    logits = vocab_logits(x, own, shard, group=dist.group.WORLD)
    logprob = vocab_logprob(logits, target, shard, group=dist.group.WORLD)
    logprob.backward(dy)
    return logprob.detach(), vocab_logprob_rows(logits, shard, group=dist.group.WORLD), x.grad, own.grad


@pytest.fixture(scope="module")
def alone():
    return results(1)[0][1][V]


@pytest.mark.parametrize("ranks, rows", CUTS)
def test_logprob(ranks, rows, alone):
    logprob, all_rows, dx, dw = alone
    assert_same_bytes(all_rows.gather(-1, values()[1][..., None])[..., 0], logprob, "a target's entry of its row")
    for rank, (_, scores) in enumerate(results(ranks)):
        got, got_rows, got_dx, got_dw = scores[rows]
        assert_same_bytes(logprob, got, f"rank {rank}")
        assert_same_bytes(all_rows, got_rows, f"rows of rank {rank}")
        true = dw[rank * rows : min(V, (rank + 1) * rows)]
        assert_same_bytes(true, got_dw[: len(true)], "weight gradient")
        assert not got_dw[len(true) :].any()
        assert_same_bytes(dx, got_dx, "input gradient")


def test_another_order_differs(alone):
    weight, target, x, _ = values()
    own = VocabShard(VocabOrder(V, 8, 128), V)
    other = VocabShard(VocabOrder(V, 1, 1024), V)
    logits = vocab_logits(x, weight, own)
    assert first_mismatch(vocab_logprob(logits, target, own), vocab_logprob(logits, target, other)) is not None


def test_nan_stays_in_its_token(alone):
    weight, target, x, _ = values()
    shard = VocabShard(ORDER, V)
    clean = vocab_logprob(vocab_logits(x, weight, shard), target, shard)
    x[3, 1] = float("nan")
    dirty = vocab_logprob(vocab_logits(x, weight, shard), target, shard)
    assert dirty[3, 1].isnan() and int(dirty.isnan().sum()) == 1
    dirty[3, 1] = clean[3, 1]
    assert_same_bytes(clean, dirty)


def test_a_shard_that_ends_inside_a_block_is_refused_with_what_works():
    with pytest.raises(ValueError, match=r"700 rows cut into 2 shards of 350, .* multiple of 256 \(such as 768\)"):
        VocabShard(ORDER, 350, 0, 2)
    with pytest.raises(ValueError, match="do not hold 700"):
        VocabShard(ORDER, 300, 0, 2)


def test_ids_outside_the_vocabulary_are_refused():
    weight, ids, x, _ = values()
    shard = VocabShard(ORDER, V)
    for wrong in (700, -100):
        ids[2, 1] = wrong
        with pytest.raises(ValueError, match=rf"id {wrong} at \[2, 1\] is outside the vocabulary of 700"):
            vocab_embedding(ids, weight, shard)
        with pytest.raises(ValueError, match=f"id {wrong}"):
            vocab_logprob(vocab_logits(x, weight, shard), ids, shard)


def test_temperature():
    logits = torch.randn(4, 5)
    assert at_temperature(logits, 1.0) is logits
    assert_same_bytes(at_temperature(logits, 0.7), logits / torch.tensor(0.7).expand_as(logits))
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            at_temperature(logits, wrong)


@pytest.mark.parametrize("vocab, runs, ranks", [(2000, 2, 4), (2100, 8, 4), (700, 8, 2), (130, 8, 4)])
def test_any_padding_gives_the_input_gradient_of_one_rank(vocab, runs, ranks):
    """Shards padded to blocks of 128 for each rank, as megatron-core pads: they may end inside runs, or hold padding alone."""
    order = VocabOrder(vocab, runs)
    rows = -(-vocab // (128 * ranks)) * 128
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(vocab, 32, generator=generator), torch.randn(8, 3, 32, generator=generator)
    dy = torch.randn(8, 3, rows * ranks, generator=generator)

    def gradient(shard, group=None):
        padded = torch.full((rows * ranks, 32), float("nan"))
        padded[:vocab] = weight
        given = x.clone().requires_grad_()
        part = slice(shard.first, shard.first + shard.rows)
        vocab_logits(given, padded[part], shard, group=group).backward(dy[..., part])
        return given.grad

    expected = gradient(VocabShard(order, rows * ranks))
    for got in run_ranks(ranks, lambda rank: gradient(VocabShard(order, rows, rank, ranks), dist.group.WORLD)):
        assert_same_bytes(expected, got)
    whole = linear.matmul(dy[..., :vocab].reshape(24, -1), weight.t()).view_as(expected)
    assert first_mismatch(expected, whole) is not None, "negative control: one leaf is another sum"


def test_logits_may_be_divided_in_place_before_the_loss():
    """As verl does with its temperature: autograd refuses that for a view made inside a function."""
    weight, ids, x, g = values()

    def gradients(divide):
        own, shard = shard_of(weight, 1, V, 0)
        inside = x.clone().requires_grad_()
        logits = divide(vocab_logits(inside, own.requires_grad_(), shard))
        vocab_logprob(logits, ids, shard).backward(g)
        return inside.grad, own.grad

    for ours, theirs in zip(gradients(lambda logits: logits.div_(0.7)), gradients(lambda logits: logits / 0.7), strict=True):
        assert_same_bytes(ours, theirs, "gradient")
