"""Layers over the Triton kernels, interpreted, on a device made in Python: one decoder as trainer (TP 2, EP 2, sequence parallel) and as paged rollout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tests.support.toy_device as toy
from benchmarks import one_card
from tio_megatron import collectives
from tio_megatron.contract import Contract
from tio_megatron.testing import assert_same_bytes, run_ranks

SHAPE = one_card.Shape(layers=1, hidden=64, heads=4, kv_heads=2, head=32, experts=4, top_k=2, ffn=32, vocab=300)
CONTRACT = Contract(family="triton-sm90")


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    toy.install()
    toy.take_family("triton")


def weights() -> one_card.Weights:
    return {name: toy.Toy(w) for name, w in SHAPE.weights(1, "cpu").items()}


IDS = torch.arange(6) * 7 % 300


def trained(rank: int) -> torch.Tensor:
    return one_card.train_scores(SHAPE, weights(), toy.Toy(IDS), CONTRACT, dist.group.WORLD if dist.get_world_size() > 1 else None).held


def test_trainer_and_rollout_are_one():
    whole = run_ranks(1, trained)[0]
    for rank, scores in enumerate(run_ranks(2, trained)):
        assert_same_bytes(scores, whole, f"TP 2 EP 2, rank {rank}")
    rollout = one_card.rollout_scores(SHAPE, weights(), toy.Toy(IDS), CONTRACT, prompt=4, chunk=3).held
    assert_same_bytes(rollout, whole, "chunked prefill, then one token at a time")
    used = {"matmul", "grouped", "attention_paged", "write_pages", "rms_norm", "swiglu", "route", "rope", "combine", "vocab_sumexp", "gather_logprob"}
    assert used <= set(toy.calls), used - set(toy.calls)
    cpu = one_card.train_scores(SHAPE, SHAPE.weights(1, "cpu"), IDS, Contract(cuts=CONTRACT.cuts)).detach()
    assert (cpu - whole).abs().max() < 0.25, "another family: near, "
    with pytest.raises(AssertionError):
        assert_same_bytes(cpu, whole, "but not the same bytes")


def differentiated(rank: int) -> dict[str, torch.Tensor]:
    """Gradients of weights that are not cut, and of this rank's rows and columns of those that are, by plain autograd."""
    size, given = dist.get_world_size(), {name: toy.Toy(w, requires_grad=True) for name, w in SHAPE.weights(1, "cpu").items()}
    scores = one_card.train_scores(SHAPE, given, toy.Toy(IDS[:4]), CONTRACT, dist.group.WORLD if size > 1 else None)
    wanted = ("0.qkv", "0.o", "0.w13", "0.w2", "head")
    found = dict(zip(wanted, torch.autograd.grad(scores.sum(), [given[name] for name in wanted]), strict=True))
    assert all(isinstance(grad, toy.Toy) for grad in found.values())
    return {name: grad.held for name, grad in found.items()}


@pytest.mark.full
def test_gradients_of_cut_weights():
    """Both ranks' parts are the whole's: the products, norms, attention, routing and dispatch between them, forward and backward."""
    whole = run_ranks(1, differentiated)[0]
    parts = run_ranks(2, differentiated)
    for name, grad in whole.items():
        both = torch.where(parts[0][name] != 0, parts[0][name], parts[1][name])
        assert_same_bytes(both + 0.0, grad + 0.0, name)
        assert grad.isfinite().all() and grad.any(), name
    with pytest.raises(AssertionError):
        assert_same_bytes(parts[0]["0.o"], whole["0.o"], "one rank's part alone")


def summed(rank: int) -> list[torch.Tensor]:
    x = torch.arange(12.0).view(4, 3) * 10.0 ** (6 * rank)
    on_toy = toy.Toy(x)
    group = dist.group.WORLD
    found = [collectives.all_reduce(on_toy, group), collectives.reduce_scatter(on_toy, group), collectives.all_gather(on_toy, group)]
    found.append(collectives.all_to_all(on_toy, None, None, group))
    plain = [
        collectives.all_reduce(x, group),
        collectives.reduce_scatter(x, group),
        collectives.all_gather(x, group),
        collectives.all_to_all(x, None, None, group),
    ]
    for one, other in zip(found, plain, strict=True):
        assert isinstance(one, toy.Toy)
        assert_same_bytes(one.held, other, "moved by way of the host")
    return plain


def test_gloo_moves_a_devices_bytes():
    run_ranks(2, summed)
