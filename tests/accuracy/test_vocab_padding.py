"""A vocabulary padded so that shards end inside the contract's runs: the input gradient is another sum, and still right."""

import torch
import torch.distributed as dist

from tio_megatron.contract import VocabOrder
from tio_megatron.layers.vocab import VocabShard, vocab_logits
from tio_megatron.testing import run_ranks

S, B, H = 8, 3, 32


def test_a_padding_that_misses_the_runs_still_gives_the_right_input_gradient():
    """2000 rows in 2 runs of 1024; 4 shards of 512 end inside runs."""
    order = VocabOrder(2000, 2, 128)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(2000, H, generator=generator), torch.randn(S, B, H, generator=generator)
    dy = torch.randn(S, B, 2048, generator=generator)

    def work(rank):
        padded = torch.full((2048, H), float("nan"))
        padded[:2000] = weight
        given = x.clone().requires_grad_()
        shard = VocabShard(order, 512, rank, 4)
        assert shard.runs is None
        vocab_logits(given, padded.chunk(4)[rank], shard, group=dist.group.WORLD).backward(dy.chunk(4, -1)[rank])
        return given.grad

    expected = (dy[..., :2000].double() @ weight.double()).float()
    for got in run_ranks(4, work):
        assert (got - expected).abs().max() < 1e-4
