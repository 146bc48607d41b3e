"""What is refused, before anything is sent, and in which words."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.contract import Node, ReductionTree
from tio_megatron.testing import run_ranks

TREE = ReductionTree(4)
WHOLE = [TREE.frontier(0, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_sums_are_fp32(dtype):
    x = torch.zeros(4, 2, dtype=dtype)
    for call in (
        lambda: collectives.all_reduce(x, None),
        lambda: collectives.reduce_scatter(x, None),
        lambda: collectives.all_reduce_nodes(x[None], WHOLE, TREE, None),
        lambda: collectives.explain(2, [3], dtype),
    ):
        with pytest.raises(ValueError, match=f"fp32 only, got {dtype}"):
            call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: collectives.all_reduce(x, None, out_dtype=torch.int32), "out_dtype must be float32 or a narrower"),
        (lambda x: collectives.all_reduce(x, None, out_dtype=torch.float64), "out_dtype must be float32 or a narrower"),
        (lambda x: collectives.all_reduce(x, None, out=torch.zeros(2, 4)), "out must be contiguous torch.float32 of shape"),
        (lambda x: collectives.all_reduce(x, None, out=torch.zeros(2, 4).t()), "out must be contiguous"),
        (lambda x: collectives.all_reduce(x.requires_grad_(), None), "not differentiable"),
        (lambda x: collectives.all_gather(x.requires_grad_(), None), "not differentiable"),
        (lambda x: collectives.reduce_scatter(x, None, splits=[3]), "splits must be 1 counts that sum to 4 rows"),
        (lambda x: collectives.reduce_scatter(x[0, 0], None), "got a scalar"),
        (lambda x: collectives.all_gather(x[0, 0], None), "got a scalar"),
        (lambda x: collectives.all_gather(x, None, sizes=[3]), "sizes says 3 rows for rank 0, it has 4"),
        (lambda x: collectives.all_to_all(x, [4], [3], None), "in_splits must be 1 counts that sum to 4 rows"),
        (lambda x: collectives.all_to_all(x, [3], [4], None), "keeps 4 rows by in_splits, but 3 by out_splits"),
        (lambda x: collectives.all_reduce_nodes(x, WHOLE, TREE, None), "holds 1 nodes (.*), but its first axis is"),
        (lambda x: collectives.all_reduce_nodes(x[:1], WHOLE * 2, TREE, None), "one entry per rank, got 2 for 1"),
        (lambda x: collectives.all_reduce_nodes(x[:1], [[Node(0, 2)]], TREE, None), "were sent by no rank"),
        (lambda x: collectives.all_max(x.int(), None), "floating point only"),
        (lambda x: collectives.explain(0, [3]), "at least one rank"),
        (lambda x: collectives.explain(2, [3], schedule="tree"), "unknown schedule 'tree'; these work: auto, doubling, scatter, ring"),
        (lambda x: collectives.bytes_sent(2, 3, schedule="doubling", scattered=True), "reduce-scatter: unknown schedule 'doubling'"),
    ],
)
def test_bad_calls_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(4, 2))


def test_unknown_schedules_and_variables(monkeypatch):
    def rank_main(rank):
        x = torch.zeros(2, 2)
        for call, words in (
            (lambda: collectives.all_reduce(x, dist.group.WORLD, schedule="tree"), "unknown schedule 'tree'"),
            (lambda: collectives.reduce_scatter(x, dist.group.WORLD, schedule="doubling"), "unknown schedule 'doubling'"),
            (lambda: collectives.reduce_scatter(x[:1], dist.group.WORLD), "1 rows do not divide by 2 ranks; pass splits, or pad to 2 rows"),
            (lambda: collectives.all_to_all(x[:1], None, None, dist.group.WORLD), "1 rows do not divide by 2 ranks"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        for name, value in (("TIO_COLLECTIVE_SCHEDULE", "tree"), ("TIO_COLLECTIVE_SWITCH_BYTES", "-1"), ("TIO_COLLECTIVE_SWITCH_BYTES", "1 MB")):
            monkeypatch.setenv(name, value)
            with pytest.raises(ValueError, match=name):
                collectives.all_reduce(x, dist.group.WORLD)
            monkeypatch.delenv(name)

    run_ranks(2, rank_main)


def test_ranks_that_disagree_are_named_when_the_check_is_on(monkeypatch):
    monkeypatch.setenv("TIO_COLLECTIVE_CHECK", "1")

    def rank_main(rank):
        group = dist.group.WORLD
        assert collectives.all_reduce(torch.ones(3), group).tolist() == [2, 2, 2]
        tree = ReductionTree(3)
        spans = [tree.frontier(0, 2), tree.frontier(2, 3)]
        assert collectives.all_reduce_nodes(torch.ones(1, 2), spans, tree, group).tolist() == [2, 2]
        assert collectives.reduce_scatter(torch.ones(2), group).tolist() == [2]
        assert collectives.all_to_all(torch.ones(2), [1, 1], [1, 1], group).tolist() == [1, 1]
        for call, words in (
            (lambda: collectives.all_reduce(torch.ones(3 + rank), group), r"ranks do not agree; rank 0: .*\(3\).*; rank 1: .*\(4\)"),
            (lambda: collectives.all_reduce(torch.ones(3), group, schedule=("ring", "scatter")[rank]), "ranks do not agree"),
            (lambda: collectives.all_gather(torch.ones(3, dtype=(torch.float32, torch.bfloat16)[rank]), group), "ranks do not agree"),
            (lambda: collectives.all_reduce(torch.ones(3), group) if rank else collectives.all_gather(torch.ones(3), group), "all_gather.*all_reduce"),
            (lambda: collectives.all_to_all(torch.ones(3), [[1, 1], [1, 2]][rank], [1, 2], group), "rank 0 sends 2 rows to rank 1, which expects 1"),
        ):
            with pytest.raises(ValueError, match=words):
                call()

    run_ranks(2, rank_main)
