"""Attention over context-parallel ranks has the bytes of one rank, forward and backward, whichever way the tokens move."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from context_plants import gradients_summed_over_ranks, ring_merge

from tio_megatron.layers import context
from tio_megatron.layers.attention import attention
from tio_megatron.layers.context import all_tokens, context_attention, global_rows, own_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

T, D = 176, 16
PACKED = torch.tensor([0, 104, 104, 112, 160], dtype=torch.int32)
"""Samples of 104, 0, 8 and 48 tokens, and 16 tokens of padding behind them."""
CASES = {
    "heads": dict(heads=8, groups=4),
    "heads packed": dict(heads=8, groups=4, starts=PACKED),
    "tokens": dict(heads=6, groups=3),
    "tokens packed": dict(heads=3, groups=1, starts=PACKED),
    "bf16": dict(heads=8, groups=4, dtype=torch.bfloat16),
}


@cache
def problem(name):
    """q, k, v and the output's gradient, whole, and the starts."""
    case = dict(starts=None, dtype=torch.float32) | CASES[name]
    generator = torch.Generator().manual_seed(0)
    shape = (T, 2) if case["starts"] is None else (T,)
    heads = (case["heads"], case["groups"], case["groups"], case["heads"])
    return [torch.randn(*shape, n, D, generator=generator).to(case["dtype"]) for n in heads], case["starts"]


def run(q, k, v, dout, function):
    """The output and the gradients."""
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    out = function(*given)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in given)]


@cache
def alone(name):
    tensors, starts = problem(name)
    return run(*tensors, lambda q, k, v: attention(q, k, v, scale=0.3, cu_seqlens=starts))


def together(ranks, names):
    """By name, the whole output and gradients put together from all ranks."""

    def work(rank):
        found = {}
        for name in names:
            tensors, starts = problem(name)
            cut = Sequences(starts, rank, ranks)
            own = global_rows(cut, T // ranks).chunk(ranks)[rank]
            group = dist.group.WORLD
            parts = run(*(t[own] for t in tensors), lambda q, k, v: context_attention(q, k, v, scale=0.3, sequences=cut, group=group))  # noqa: B023
            found[name] = [all_tokens(part[None], cut, group)[0] for part in parts]
        return found

    results = run_ranks(ranks, work)
    assert_same_bytes(results, [results[0]] * ranks)
    return results[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_output_and_gradients_are_those_of_one_rank(ranks):
    found = together(ranks, CASES)
    for name in CASES:
        assert_same_bytes(alone(name), found[name], name)


def test_each_way_is_taken_where_it_should_be(monkeypatch):
    taken = []

    def note(kind):
        real = getattr(context, kind)
        monkeypatch.setattr(context, kind, lambda *args: taken.append(kind) or real(*args))

    note("_Heads")
    note("_Tokens")

    def work(rank):
        for heads, groups in ((8, 4), (6, 3), (4, 1)):
            q, k = torch.zeros(4, 1, heads, D), torch.zeros(4, 1, groups, D)
            context_attention(q, k, k, scale=1.0, sequences=Sequences(None, rank, 2), group=dist.group.WORLD)
        return taken

    assert run_ranks(2, work) == [["_Heads", "_Tokens", "_Tokens"]] * 2


def test_partial_softmaxes_merged_in_ring_order_are_caught(monkeypatch):
    """The plant differs from the real attention in the merging alone: with one rank it has its bytes."""
    for name in ("tokens", "heads packed", "bf16"):
        (q, k, v, _), starts = problem(name)
        assert_same_bytes(alone(name)[0], ring_merge(1)(q, k, v, scale=0.3, cu_seqlens=starts), name)
        assert first_mismatch(alone(name)[0], ring_merge(2)(q, k, v, scale=0.3, cu_seqlens=starts)) is not None, name


def test_gradients_added_over_ranks_are_caught(monkeypatch):
    tensors, _ = problem("heads")
    assert_same_bytes(alone("heads"), run(*tensors, lambda *qkv: gradients_summed_over_ranks(1)(*qkv, scale=0.3)))
    monkeypatch.setattr(context, "attention", gradients_summed_over_ranks(2))
    found = together(2, ["heads"])["heads"]
    assert_same_bytes(alone("heads")[:2], found[:2], "output and dq have no sum over ranks")
    assert all(first_mismatch(ours, theirs) for ours, theirs in zip(alone("heads")[2:], found[2:], strict=True))


def test_no_tokens_at_all():
    def work(rank):
        empty = torch.empty(0, 2, 4, D)
        for starts, shape in ((None, (0, 2, 4, D)), (torch.zeros(3, dtype=torch.int32), (0, 4, D))):
            empty = torch.empty(shape, requires_grad=True)
            out = context_attention(empty, empty, empty, scale=1.0, sequences=Sequences(starts, rank, 2), group=dist.group.WORLD)
            out.sum().backward()
            assert out.shape == empty.grad.shape == shape

    run_ranks(2, work)


def test_tokens_are_cut_in_zig_zag():
    x = torch.arange(8)[None]
    assert [own_tokens(x, Sequences(None, rank, 2)).tolist() for rank in range(2)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    starts = torch.tensor([0, 4, 4])
    assert [own_tokens(x, Sequences(starts, rank, 2)).tolist() for rank in range(2)] == [[[0, 3, 4, 7]], [[1, 2, 5, 6]]]
    assert own_tokens(x, Sequences(starts)) is x


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="6 tokens do not divide into 4 chunks; pad them"):
        own_tokens(torch.zeros(1, 6), Sequences(None, 0, 2))
    with pytest.raises(ValueError, match="sample 1 has 6 tokens, which do not divide into 4 chunks"):
        own_tokens(torch.zeros(1, 12), Sequences(torch.tensor([0, 4, 10]), 0, 2))
    q = torch.zeros(3, 1, 4, D)
    with pytest.raises(ValueError, match="sample 0 has 6 tokens, which do not divide into 4 chunks"):
        context_attention(q, q, q, scale=1.0, sequences=Sequences(None, 0, 2), group=None)
    q = torch.zeros(4, 1, 4, D)
    with pytest.raises(ValueError, match="cut for rank 1 of 2, but this is rank 0 of a group of 1"):
        context_attention(q, q, q, scale=1.0, sequences=Sequences(None, 1, 2), group=None)
