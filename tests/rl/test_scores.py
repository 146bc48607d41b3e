"""Log-probability and entropy at a temperature, cut over ranks or not."""

import pytest
import torch
import torch.distributed as dist

from tio_megatron.contract import Contract
from tio_megatron.layers.vocab import VocabShard, at_temperature, vocab_logprob
from tio_megatron.rl import token_entropy, token_logprob
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

V = 700


def values():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, V, generator=generator) * 3, torch.randint(V, (5,), generator=generator), torch.randn(2, 5, generator=generator)


def scores(rank, ranks, rows, temperature=0.7):
    logits, target, dy = values()
    padded = torch.full((5, ranks * rows), float("nan"))
    padded[:, :V] = logits
    mine = padded.chunk(ranks, 1)[rank].clone().requires_grad_()
    group = dist.group.WORLD if ranks > 1 else None
    found = (
        token_logprob(mine, target, V, temperature=temperature, group=group),
        token_entropy(mine, V, temperature=temperature, group=group),
    )
    torch.autograd.backward(found, tuple(dy))
    return found[0].detach(), found[1].detach(), mine.grad


@pytest.mark.parametrize("ranks, rows", [(2, 384), (4, 256)])
def test_ranks(ranks, rows):
    logprob, entropy, gradient = scores(0, 1, V)
    for rank, (got_logprob, got_entropy, got_gradient) in enumerate(run_ranks(ranks, scores, ranks, rows)):
        assert_same_bytes((logprob, entropy), (got_logprob, got_entropy), f"rank {rank}")
        true = gradient[:, rank * rows : (rank + 1) * rows]
        assert_same_bytes(true, got_gradient[:, : true.shape[1]])


def test_temperature_is_the_layers_own():
    logits, target, _ = values()
    shard = VocabShard(Contract().vocab_order(V), V)
    assert_same_bytes(token_logprob(logits, target, V, temperature=0.7), vocab_logprob(at_temperature(logits, 0.7), target, shard))
    assert first_mismatch(token_logprob(logits, target, V), token_logprob(logits, target, V, temperature=0.7))
    with pytest.raises(ValueError, match="temperature"):
        token_entropy(logits, V, temperature=0.0)


def test_an_even_distribution_and_a_certain_one():
    assert_same_bytes(token_entropy(torch.zeros(1, 4), 4), torch.tensor([4.0]).log())
    assert_same_bytes(token_entropy(torch.tensor([[0.0, -200.0, -float("inf")]]), 3), torch.zeros(1))
