"""The expert layer on replicated tokens: however experts are shared out or cut, one rank's bytes."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tio_megatron.kernels.grouped import PackedExperts
from tio_megatron.kernels.router import route
from tio_megatron.layers.experts_replicated import experts_replicated
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

E, K, H, WIDTH, LEAVES = 12, 4, 64, 96, 4


def case(tokens: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(dtype)
    # Expert 5 gets nothing.
    logits = torch.randn(tokens, E, generator=generator) * 2
    logits[:, 5] = -100.0
    w13 = (torch.randn(E, 2 * WIDTH, H, generator=generator) * 0.2).to(dtype)
    w2 = (torch.randn(E, H, WIDTH, generator=generator) * 0.2).to(dtype)
    return x, *route(logits, K), w13, w2


def alone(tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x, ids, probs, w13, w2 = case(tokens, dtype)
    return experts_replicated(x, ids, probs, PackedExperts.from_weights(w13), PackedExperts.from_weights(w2), experts=E, leaves=LEAVES)


def shared_out(rank: int, spans, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    x, ids, probs, w13, w2 = case(tokens, dtype)
    lo, hi = spans[rank]
    return experts_replicated(x, ids, probs, w13[lo:hi], w2[lo:hi], experts=E, leaves=LEAVES, span=(lo, hi), spans=spans, ep_group=dist.group.WORLD)


def cut(rank: int, ranks: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    x, ids, probs, w13, w2 = case(tokens, dtype)
    gate, up = w13.chunk(2, dim=1)
    shard = torch.cat([part.chunk(ranks, dim=1)[rank] for part in (gate, up)], dim=1)
    return experts_replicated(x, ids, probs, shard, w2.chunk(ranks, dim=2)[rank].contiguous(), experts=E, leaves=LEAVES // ranks, etp_group=dist.group.WORLD)


SPANS = [[(0, 6), (6, 12)], [(0, 4), (4, 8), (8, 12)], [(0, 5), (5, 12)], [(0, 3), (3, 6), (6, 9), (9, 12)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spans", SPANS, ids=lambda spans: f"EP {len(spans)}, {spans[0][1]} first")
def test_shared_out(spans, dtype: torch.dtype) -> None:
    """Two, three and four ranks, uneven runs, an expert without a row."""
    for got in run_ranks(len(spans), shared_out, spans, 37, dtype):
        assert_same_bytes(got, alone(37, dtype))


def with_rows_of_others(rank: int, spans, tokens: int) -> torch.Tensor:
    layer = sys.modules[experts_replicated.__module__]
    with mock.patch.object(layer, "_few", lambda ids: True):
        return shared_out(rank, spans, tokens, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 37])
def test_rows_of_other_ranks_change_nothing(tokens: int) -> None:
    """What few tokens on an accelerator take: a row for every choice on every rank."""
    for got in run_ranks(3, with_rows_of_others, SPANS[1], tokens):
        assert_same_bytes(got, alone(tokens, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut(ranks: int, dtype: torch.dtype) -> None:
    for got in run_ranks(ranks, cut, ranks, 37, dtype):
        assert_same_bytes(got, alone(37, dtype))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_and_ranks_without_a_row(tokens: int) -> None:
    spans = SPANS[3]
    for got in run_ranks(4, shared_out, spans, tokens, torch.float32):
        assert_same_bytes(got, alone(tokens))


def test_a_token_is_alone_what_it_is_in_a_batch() -> None:
    x, ids, probs, w13, w2 = case(37)
    whole = alone(37)
    for token in (0, 36):
        one = slice(token, token + 1)
        assert_same_bytes(experts_replicated(x[one], ids[one], probs[one], w13, w2, experts=E, leaves=LEAVES), whole[one])


def test_other_orders_differ() -> None:
    """The negative control: the same rows added one after another, and the same product with other leaves."""
    x, ids, probs, w13, w2 = case(37)
    total = torch.zeros(37, H)
    for expert in range(E):
        gate, up = (x @ w13[expert].T).chunk(2, dim=1)
        weight = torch.where(ids == expert, probs, 0.0).sum(1, keepdim=True)
        total = total + weight * ((torch.nn.functional.silu(gate) * up) @ w2[expert].T)
    assert (total - alone(37)).abs().max() < 1e-3  # near, so that only the order is another
    assert first_mismatch(total, alone(37)) is not None
    assert first_mismatch(experts_replicated(x, ids, probs, w13, w2, experts=E, leaves=1), alone(37)) is not None


@pytest.mark.parametrize(
    ("span", "spans", "words"),
    [((0, 6), None, "without a group"), ((0, 6), [(0, 6), (6, 11)], "do not cover 12"), ((0, 5), [(0, 6), (6, 12)], "none of")],
)
def test_refusals(span, spans, words: str) -> None:
    x, ids, probs, w13, w2 = case(3)

    def run(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            experts_replicated(x, ids, probs, w13[:6], w2[:6], experts=E, leaves=1, span=span, spans=spans, ep_group=dist.group.WORLD if spans else None)
        return str(caught.value)

    assert words in run_ranks(1, run)[0]
