"""Combining expert rows: the reference's bytes, any cut of the experts over ranks, and the wrong orders people have shipped."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.contract import Node, ReductionTree
from tio_megatron.kernels.combine import combine, combine_backward, reference
from tio_megatron.testing import assert_same_bytes, first_mismatch


def _choices(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row of each choice (some are elsewhere), ascending experts, probabilities."""
    ids = torch.stack([torch.randperm(experts)[:top_k].sort().values for _ in range(tokens)])
    index = torch.randperm(tokens * top_k).view(tokens, top_k)
    return index, ids, torch.rand(tokens, top_k)


@pytest.mark.parametrize("tokens, experts, top_k, h", [(1, 1, 1, 1), (5, 16, 4, 70), (7, 128, 8, 300), (3, 6, 5, 130), (4, 24, 3, 16)])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, tokens: int, experts: int, top_k: int, h: int) -> None:
    index, ids, probs = _choices(tokens, experts, top_k)
    rows, dout = torch.randn(tokens * top_k + 2, h).to(dtype), torch.randn(tokens, h).to(dtype)
    index[0, 0] = -1
    nodes = [ReductionTree(experts).root]
    for p in (probs, None):
        assert_same_bytes(combine(rows, index, ids, p, experts=experts, nodes=nodes), reference.combine(rows, index, ids, p, experts=experts, nodes=nodes))
        assert_same_bytes(combine_backward(dout, rows, index, p), reference.combine_backward(dout, rows, index, p))
        assert_same_bytes(combine_backward(dout.float(), rows, index, p), reference.combine_backward(dout.float(), rows, index, p))


@pytest.mark.parametrize("cuts", [(0, 24), (0, 12, 24), (0, 5, 6, 20, 24), tuple(range(25)), (0, 0, 24, 24)])
def test_any_cut_of_the_experts_gives_the_root(isa: str, cuts: tuple[int, ...]) -> None:
    tree = ReductionTree(24)
    index, ids, probs = _choices(9, 24, 8)
    rows = torch.randn(72, 33).bfloat16()
    whole = combine(rows, index, ids, probs, experts=24, nodes=[tree.root])[0]
    partials = []
    for lo, hi in zip(cuts, cuts[1:], strict=False):
        nodes = tree.frontier(lo, hi)
        here = torch.where((ids >= lo) & (ids < hi), index, -1)  # a rank has its own experts' rows only
        partials.append(dict(zip(nodes, combine(rows, here, ids, probs, experts=24, nodes=nodes), strict=True)))
    assert_same_bytes(tree.combine(partials), whole)


RANKS = 4
"""Two ranks commute; three or more show in which order they are added."""


def _one_after_another(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Pain 1: a token's experts in sequence, as a scatter-add has them."""
    return _chain(list(terms.unbind(1)))


def _from_any_expert_on(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """In sequence, but each token from another expert on."""
    order = (start.unsqueeze(1) + torch.arange(terms.shape[1])) % terms.shape[1]
    return _chain(list(terms.gather(1, order.unsqueeze(2).expand_as(terms)).unbind(1)))


def _pairs_of_choices(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """A tree over the choices instead of the experts: no rank could add up its own part of it."""
    return ReductionTree(terms.shape[1]).reduce(list(terms.unbind(1)))


def _rank_after_rank(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Each rank's sum is right; then rank 0, 1, 2, 3."""
    return _chain(list(parts))


def _ring_from_the_owner(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Pain 4: rank after rank, from the right neighbour of the token's owner on."""
    order = (start.unsqueeze(1) + 1 + torch.arange(RANKS)).T % RANKS
    return _chain(list(parts.gather(0, order.unsqueeze(2).expand_as(parts))))


def _ranks_rounded(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Pain 2: the right tree, over ranks' sums that were rounded to bf16."""
    return ReductionTree(RANKS).reduce(list(parts.bfloat16().float())).bfloat16()


def _added_in_bf16(terms: torch.Tensor, parts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Every term and every sum rounded to bf16."""
    total = terms[:, 0].bfloat16()
    for term in terms.bfloat16().unbind(1)[1:]:
        total = total + term
    return total


def _chain(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


PLANTS = (_one_after_another, _from_any_expert_on, _pairs_of_choices, _rank_after_rank, _ring_from_the_owner, _ranks_rounded, _added_in_bf16)


@pytest.mark.parametrize("tokens, experts, top_k, h", [(64, 128, 8, 64), (80, 16, 4, 48), (50, 32, 5, 33)])
def test_planted_orders_differ(tokens: int, experts: int, top_k: int, h: int) -> None:
    """On the same inputs: the ranks' sums make the root in the tree's order, and other bytes in each of the orders that people have shipped."""
    tree = ReductionTree(experts)
    index, ids, probs = _choices(tokens, experts, top_k)
    rows = torch.randn(tokens * top_k, h).bfloat16()
    root = combine(rows, index, ids, probs, experts=experts, nodes=[tree.root])[0]
    each = experts // RANKS
    parts = torch.stack(
        [combine(rows, torch.where(ids // each == rank, index, -1), ids, probs, experts=experts, nodes=[Node(rank * each, each)])[0] for rank in range(RANKS)]
    )
    assert_same_bytes(ReductionTree(RANKS).reduce(list(parts)), root)
    terms, start = reference.weighted(rows, index, probs), torch.randint(0, 64, (tokens,))
    for plant in PLANTS:
        wrong = plant(terms, parts, start)
        assert first_mismatch(root.to(wrong.dtype), wrong) is not None, plant.__name__


def test_a_product_contracted_into_the_sum_differs() -> None:
    """What a compiler makes of ``sum += row * prob`` unless it is told not to: the product loses its own rounding."""
    index, ids, probs = _choices(64, 4, 2)  # two choices: both orders of the sum are one
    rows = torch.randn(128, 64).bfloat16()
    root = combine(rows, index, ids, probs, experts=4, nodes=[ReductionTree(4).root])[0]
    first, second = reference.weighted(rows, index, probs).unbind(1)
    assert_same_bytes(first + second, root)
    contracted = (first.double() + rows[index[:, 1]].double() * probs[:, 1:].double()).float()
    assert first_mismatch(contracted, root) is not None


def test_absent_is_minus_zero_and_nan_rows_are_not_read(isa: str) -> None:
    """Pain 12: rows nobody names may hold NaN; so may the probabilities and ids of choices that are elsewhere."""
    rows = torch.full((4, 20), float("nan"))
    rows[1] = 2.0
    index, ids = torch.tensor([[-1, 1], [-1, -1]]), torch.tensor([[-7, 3], [99, 99]])
    probs = torch.tensor([[float("nan"), 0.5], [float("nan")] * 2])
    out = combine(rows, index, ids, probs, experts=4, nodes=[Node(0, 2), Node(2, 2)])
    assert_same_bytes(out[1, 0], torch.ones(20))
    assert_same_bytes(out[0], torch.full((2, 20), -0.0))
    assert_same_bytes(out[1, 1], torch.full((20,), -0.0))
    drows, dprobs = combine_backward(torch.ones(2, 20), rows, index, probs)
    assert_same_bytes(drows[[0, 2, 3]], torch.zeros(3, 20))
    assert dprobs is not None
    assert_same_bytes(dprobs, torch.tensor([[0.0, 40.0], [0.0, 0.0]]))


def test_no_tokens_no_rows(isa: str) -> None:
    index = torch.empty(0, 2, dtype=torch.int64)
    assert combine(torch.empty(0, 8), index, index, torch.empty(0, 2), experts=4, nodes=[Node(0, 4)]).shape == (1, 0, 8)
    assert combine(torch.ones(3, 8), index, index, None, experts=4, nodes=[]).shape == (0, 0, 8)
    drows, _ = combine_backward(torch.empty(0, 8), torch.ones(3, 8), index, torch.empty(0, 2))
    assert_same_bytes(drows, torch.zeros(3, 8))
    nowhere = torch.full((2, 2), -1)
    assert_same_bytes(combine(torch.empty(0, 8), nowhere, nowhere, torch.ones(2, 2), experts=4, nodes=[Node(0, 4)]), torch.full((1, 2, 8), -0.0))


@pytest.mark.parametrize(
    "index, ids, says",
    [([[0, 5]], [[0, 1]], "past the 2 rows"), ([[0, 1]], [[0, 4]], "outside 0 .. 3"), ([[0, 1]], [[1, 1]], "must ascend"), ([[0, 1]], [[2, 1]], "must ascend")],
)
def test_refusals(index: list[list[int]], ids: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        combine(torch.ones(2, 8), torch.tensor(index), torch.tensor(ids), None, experts=4, nodes=[Node(0, 4)])
    with pytest.raises(ValueError, match="a row twice"):
        combine_backward(torch.ones(1, 8), torch.ones(2, 8), torch.tensor([[1, 1]]), None)
