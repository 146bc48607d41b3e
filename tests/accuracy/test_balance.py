"""The sequence-wise balance loss against float64, and its size against stock megatron-core's where that is defined alike."""

import dataclasses
import functools

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

from examples.qwen3_moe.training import Recipe, Training, parse
from tio_megatron.contract import Contract
from tio_megatron.layers.balance import add_balance_loss
from tio_megatron.layers.grains import MicroBatch
from tio_megatron.layers.router import route_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import run_ranks
from tio_megatron.testing.qwen3 import MOE, write_tiny

COEFFICIENT = 0.3


@pytest.mark.parametrize("experts, top_k, normalise", [(16, 4, True), (128, 8, True), (33, 2, False)])
def test_value_and_gradient_against_float64(experts, top_k, normalise):
    length, samples = 50, 3
    logits, dprobs = torch.randn(length * samples, experts) * 2, torch.randn(length * samples, top_k)
    padding = (torch.arange(length)[:, None] >= torch.tensor([50, 31, 7])).reshape(-1)
    ours = logits.clone().requires_grad_()
    ids, probs = route_tokens(ours, top_k, normalise=normalise, padding=padding)
    where = {"batch": MicroBatch(Sequences(), 8), "length": length, "samples": samples, "slices": 1, "padding": padding}
    probs, values = add_balance_loss(probs, ours, ids, **where, coefficient=COEFFICIENT)
    probs.backward(dprobs)

    exact = logits.double().requires_grad_()
    p = torch.softmax(exact, 1)
    chosen = p.gather(1, ids.clamp(min=0))
    chosen = chosen / chosen.sum(1, keepdim=True) if normalise else chosen
    total = (chosen * dprobs)[~padding].sum()
    for sample in range(samples):
        here = ((torch.arange(length * samples) % samples == sample) & ~padding).nonzero().squeeze(1)
        counts = torch.bincount(ids[here].flatten(), minlength=experts).double()
        loss = experts / (top_k * len(here) ** 2) * (counts * p[here].sum(0)).sum()
        assert abs(values[sample] / loss - 1) < 1e-6
        stock = switch_load_balancing_loss_func(p[here], counts, len(here), top_k, experts, 1.0)
        assert abs(values[sample] / stock - 1) < 1e-6
        total = total + COEFFICIENT * len(here) * loss
    total.backward()
    assert (ours.grad - exact.grad).abs().max() < 1e-6 * exact.grad.abs().max()


@functools.cache
def norms(path):
    """The norm of the first step's gradients: ours and stock's, without the auxiliary loss and with it; micro-batches of one whole sample."""

    def main(rank, loss, contract):
        run = Training(dataclasses.replace(recipe, aux_loss=loss), parse("tp1", grouped=contract is not None), contract)
        norm = run.step()[1]
        run.close()
        return norm

    recipe = Recipe(write_tiny(path, MOE, torch_dtype="float32", vocab_size=1024), steps=1, samples=3, shortest=9, longest=24)
    return [[run_ranks(1, main, loss, contract, timeout=300)[0] for loss in (0.0, 0.5)] for contract in (Contract(), None)]


def test_its_size_is_stocks_for_micro_batches_of_one_sample(tmp_path):
    ours, stock = norms(tmp_path / "model")
    assert abs(ours[0] / stock[0] - 1) < 1e-4 and abs(ours[1] / stock[1] - 1) < 1e-4
    assert abs(ours[1] / ours[0] - 1) > 1e-2, "it shows"
