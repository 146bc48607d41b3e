"""megatron-core's own tensor-parallel collectives under a contract: the tree over ranks, for forward and backward; stock's order differs."""

from functools import cache

import pytest
import torch
from megatron.core.tensor_parallel import mappings, vocab_parallel_cross_entropy

import tio_megatron
from tio_megatron.contract import ReductionTree
from tio_megatron.integrations.megatron import cpu_device
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

RANKS = 4
SPLITS = [3, 0, 1, 4]


def value(rank, dtype=torch.float32, rows=8):
    """The first column tells orders apart: 1e20, 1, -1e20, 1 is 0, 1 or 2."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank))
    x[:, 0] = (1e20, 1.0, -1e20, 1.0)[rank]
    return x.to(dtype)


def gradient_of(operation, x, dy):
    x.requires_grad_()
    operation(x).backward(dy)
    return x.grad


def everything(rank):
    from megatron.core import parallel_state

    cpu_device.enable()
    parallel_state.initialize_model_parallel(RANKS)
    found = {}
    for order in ("stock", "ours"):
        if order == "ours":
            tio_megatron.apply()
        for dtype in (torch.float32, torch.bfloat16):
            x = value(rank, dtype)
            reduced = mappings.reduce_from_tensor_model_parallel_region(x.clone())
            scattered = mappings.reduce_scatter_to_sequence_parallel_region(x.clone())
            last = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(torch.cat([x] * 2, 1)[:, :8].clone())
            copied = gradient_of(mappings.copy_to_tensor_model_parallel_region, torch.zeros(8, 6, dtype=dtype), x.clone())
            gathered = gradient_of(mappings.gather_from_sequence_parallel_region, torch.zeros(2, 6, dtype=dtype), x.clone())
            found[order, dtype] = reduced, scattered, last, copied, gathered
        group = parallel_state.get_tensor_model_parallel_group()
        found[order, "uneven"] = (
            mappings._reduce_scatter_along_first_dim(value(rank), group, SPLITS),
            mappings._gather_along_first_dim(value(rank)[: SPLITS[rank]], group, SPLITS),
        )
        found[order, "integers"] = mappings.reduce_from_tensor_model_parallel_region(torch.tensor([rank, 7]))
    logits = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(rank))
    found["loss"] = vocab_parallel_cross_entropy(logits, torch.full((5, 2), 300))
    with pytest.raises(ValueError, match="label_smoothing=0.1"):
        vocab_parallel_cross_entropy(logits, torch.full((5, 2), 300), 0.1)
    with pytest.raises(ValueError, match="dtype torch.float64 is not supported"):
        mappings.reduce_from_tensor_model_parallel_region(torch.zeros(2, dtype=torch.float64))
    tio_megatron.undo()
    return found


@cache
def results():
    return run_ranks(RANKS, everything)


def by_the_tree(dtype, make=lambda x: x):
    return ReductionTree(RANKS).reduce([make(value(rank, dtype)).float() for rank in range(RANKS)]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_obey_the_tree_and_stock_does_not(dtype):
    total = by_the_tree(dtype)
    last = by_the_tree(dtype, lambda x: torch.cat([x] * 2, 1)[:, :8])
    for rank in range(RANKS):
        expected = total, total.chunk(RANKS)[rank], last.chunk(RANKS, 1)[rank], total, total.chunk(RANKS)[rank]
        assert_same_bytes(expected, results()[rank]["ours", dtype], f"rank {rank}")
    stock = [results()[rank]["stock", dtype] for rank in range(RANKS)]
    assert any(first_mismatch(total, found[0]) for found in stock)
    assert first_mismatch(total, torch.cat([found[1] for found in stock])) is not None


def test_uneven_sums_and_moves():
    total = by_the_tree(torch.float32)
    for rank in range(RANKS):
        mine, gathered = results()[rank]["ours", "uneven"]
        assert_same_bytes(total.split(SPLITS)[rank], mine)
        assert_same_bytes(torch.cat([value(r)[: SPLITS[r]] for r in range(RANKS)]), gathered)
        assert_same_bytes(gathered, results()[rank]["stock", "uneven"][1], "the CPU device moves the same bytes")


def test_integers_have_no_order():
    for rank in range(RANKS):
        assert_same_bytes(torch.tensor([6, 28]), results()[rank]["ours", "integers"])


def test_a_function_imported_before_apply_is_ours_too():
    """vocab_parallel_cross_entropy was imported by value at the top of this file."""
    from tio_megatron.contract import Contract
    from tio_megatron.layers.vocab import VocabShard, vocab_logprob

    logits = torch.cat([torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)], -1)
    expected = -vocab_logprob(logits, torch.full((5, 2), 300), VocabShard(Contract().vocab_order(512), 512))
    for rank in range(RANKS):
        assert_same_bytes(expected, results()[rank]["loss"])
