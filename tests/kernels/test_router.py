"""Routing: the reference's bytes, ties, NaN, and the one rule for probabilities."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels import router
from tio_megatron.kernels.exact import chain_sum
from tio_megatron.kernels.router import reference
from tio_megatron.testing import assert_same_bytes, first_mismatch


@pytest.mark.parametrize("tokens, experts, top_k", [(1, 1, 1), (3, 4, 2), (37, 16, 4), (20, 128, 8), (5, 33, 33)])
@pytest.mark.parametrize("normalise", [True, False])
def test_bytes_are_the_references(isa: str, tokens: int, experts: int, top_k: int, normalise: bool) -> None:
    logits, dprobs = torch.randn(tokens, experts) * 3, torch.randn(tokens, top_k)
    assert_same_bytes(router.scores(logits), reference.scores(logits))
    ids, probs = router.route(logits, top_k, normalise)
    assert_same_bytes((ids, probs), reference.route(logits, top_k, normalise))
    assert_same_bytes(router.route_backward(dprobs, logits, ids, normalise), reference.route_backward(dprobs, logits, ids, normalise))


def test_ties_go_to_the_lower_expert(isa: str) -> None:
    """Pain 7. bf16 logits tie; so do probabilities whose exponentials round to the same number."""
    logits = torch.randn(200, 128).bfloat16().float()
    ids, _ = router.route(logits, 8)
    assert_same_bytes(ids, reference.route(logits, 8)[0])
    p = router.scores(logits)
    tied = 0
    for t in range(200):
        chosen = set(ids[t].tolist())
        least = p[t, ids[t]].min()
        same = (p[t] == least).nonzero().squeeze(1).tolist()
        inside = [e for e in same if e in chosen]
        assert inside == same[: len(inside)]
        tied += len(inside) < len(same)
    assert tied, "no tie at the last place: the test shows nothing"
    assert router.route(torch.zeros(1, 128), 8)[0].tolist() == [list(range(8))]


def test_other_rules_give_other_bytes() -> None:
    """Pain 8: softmax over the chosen only, and a sum by probability instead of by id, both differ somewhere."""
    logits = torch.randn(300, 128)
    ids, probs = router.route(logits, 8)
    after = torch.softmax(logits.gather(1, ids), -1)
    assert first_mismatch(after, probs)
    chosen = reference.scores(logits).gather(1, ids)
    by_probability = chosen / chain_sum(chosen.sort(-1, descending=True).values).unsqueeze(-1)
    assert first_mismatch(by_probability, probs)


def test_a_row_does_not_see_its_batch_and_nan_stays(isa: str) -> None:
    logits = torch.randn(40, 16)
    logits[5, 3], logits[6, 0], logits[7] = float("nan"), float("inf"), -float("inf")
    ids, probs = router.route(logits, 4)
    assert_same_bytes((ids, probs), reference.route(logits, 4))
    assert ids[5:8].tolist() == [[0, 1, 2, 3]] * 3 and probs[5:8].isnan().all()
    assert not probs[:5].isnan().any() and not probs[8:].isnan().any()
    for rows in ([0], [3, 39], [39, 8, 2]):
        assert_same_bytes(router.route(logits[rows], 4), (ids[rows], probs[rows]))


def test_empty_autograd_and_refusals() -> None:
    ids, probs = router.route(torch.empty(0, 8), 2)
    assert ids.shape == probs.shape == (0, 2) and router.route_backward(probs, torch.empty(0, 8), ids).shape == (0, 8)
    logits, dprobs = torch.randn(3, 8, requires_grad=True), torch.randn(3, 2)
    ids, probs = router.route(logits, 2)
    assert_same_bytes(torch.autograd.grad(probs, logits, dprobs)[0], router.route_backward(dprobs, logits.detach(), ids))
    with pytest.raises(ValueError, match="top_k 9 of 8 experts"):
        router.route(torch.ones(1, 8), 9)
    with pytest.raises(ValueError, match="torch.float32"):
        router.route(torch.ones(1, 8).bfloat16(), 2)
    with pytest.raises(ValueError, match="outside the 8 experts"):
        router.route_backward(torch.ones(1, 1), torch.ones(1, 8), torch.tensor([[8]]))


@pytest.mark.parametrize("tokens, experts, top_k", [(1, 1, 1), (37, 16, 4), (70, 128, 8), (5, 33, 33)])
def test_balance_has_the_references_bytes(isa: str, tokens: int, experts: int, top_k: int) -> None:
    logits, samples = torch.randn(tokens, experts) * 3, torch.randint(-1, 3, (tokens,))
    ids, _ = router.route(logits, top_k)
    ids[samples < 0] = -1
    sums = router.balance_sums(logits, ids, samples, 3)
    assert_same_bytes(sums, reference.balance_sums(logits, ids, samples, 3))
    weights = router.balance_weights(sums, 0.02)
    assert_same_bytes(router.balance_backward(logits, weights, samples), reference.balance_backward(logits, weights, samples))


def test_balance_does_not_depend_on_the_order_or_the_cut_of_tokens(isa: str) -> None:
    logits, samples = torch.randn(300, 16), torch.randint(3, (300,))
    ids, _ = router.route(logits, 4)
    whole, order = router.balance_sums(logits, ids, samples, 3), torch.randperm(300)
    parts = [router.balance_sums(logits[part], ids[part], samples[part], 3) for part in order.split(70)]
    assert_same_bytes(torch.stack(parts).sum(0), whole)
    weights = router.balance_weights(whole, 0.02)
    assert_same_bytes(router.balance_backward(logits[order], weights, samples[order]), router.balance_backward(logits, weights, samples)[order])
    p = router.scores(logits)
    assert first_mismatch(p.flip(0).sum(0), p.sum(0)), "a sum in fp32 does depend on it"


def test_balance_of_nan_and_of_nothing() -> None:
    logits, samples = torch.randn(8, 4), torch.tensor([0, 0, 1, 1, 1, 2, 2, -1])
    logits[3, 1] = logits[7, 0] = float("nan")
    ids, _ = router.route(logits, 2)
    sums = router.balance_sums(logits, ids, samples, 4)
    assert sums[:, -1].tolist() == [0, 1, 0, 0] and sums[:, :4].sum(1).tolist() == [4, 6, 4, 0]
    value, weights = router.balance_value(sums, 2), router.balance_weights(sums, 1.0)
    assert value.isnan().tolist() == [False, True, False, False] and value[3] == 0 and not weights[3].any()
    dlogits = router.balance_backward(logits, weights, samples)
    assert dlogits.isnan().any(1).nonzero().squeeze(1).tolist() == [3] and not dlogits[7].any()
    even = router.balance_sums(torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3]] * 2), torch.zeros(4, dtype=torch.int64), 1)
    assert router.balance_value(even, 2).item() == 1.0, "tokens spread evenly"
    empty = router.balance_sums(torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 2)
    assert empty.shape == (2, 9) and not empty.any()
    with pytest.raises(ValueError, match="samples outside the 2 samples"):
        router.balance_sums(logits, ids, samples, 2)
    with pytest.raises(ValueError, match="samples reach outside"):
        router.balance_backward(logits, weights[:1], samples)
