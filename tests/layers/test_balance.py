"""The sequence-wise balance loss has one value and one gradient, however a micro-batch is cut, packed and padded."""

import functools

import pytest
import torch
import torch.distributed as dist

from tio_megatron.kernels.router import balance_weights, reference
from tio_megatron.layers import balance
from tio_megatron.layers.balance import add_balance_loss
from tio_megatron.layers.grains import MicroBatch
from tio_megatron.layers.router import route_tokens
from tio_megatron.layers.sequences import Sequences
from tio_megatron.testing import assert_same_bytes, first_mismatch, run_ranks

E, K, LENGTHS = 16, 4, (40, 24, 9)
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = [torch.randn(n, E, generator=GENERATOR) * 2 for n in LENGTHS]
DPROBS = [torch.randn(n, K, generator=GENERATOR) for n in LENGTHS]


def laid(parts, width, fill=float("nan")):
    """Samples padded to one width: ``[width, samples, ...]``."""
    rows = [torch.cat((p, p.new_full((width - len(p), *p.shape[1:]), fill))) for p in parts]
    return torch.stack(rows, 1)


def run(logits, dprobs, padding, batch, length, samples, slices=1):
    """Values ``[S]`` and the whole gradient of the logits, for rows as they lie."""
    logits = logits.clone().requires_grad_()
    ids, probs = route_tokens(logits, K, normalise=True, padding=padding)
    where = {"batch": batch, "length": length, "samples": samples, "slices": slices, "padding": padding}
    probs, values = add_balance_loss(probs, logits, ids, **where, coefficient=0.1)
    probs.backward(dprobs)
    return values, logits.grad


WHOLE = Sequences()


def padded(width, sequences=WHOLE, slices=1, **groups):
    """The part of this rank: values, and the gradient of each of its rows by (sample, position)."""
    logits, dprobs = laid(LOGITS, width), laid(DPROBS, width, 0.0)
    hidden = laid([torch.zeros(n, dtype=torch.bool) for n in LENGTHS], width, True)
    batch = MicroBatch(sequences, 8, **groups)
    length = width // sequences.ranks
    sample, position = sequences.rows(length, len(LENGTHS))
    if slices > 1:
        part = dist.get_rank() % slices
        sample, position = sample.chunk(slices)[part], position.chunk(slices)[part]
    own = [t[position, sample] for t in (logits, dprobs, hidden)]
    values, dlogits = run(own[0], own[1], own[2], batch, length, len(LENGTHS), slices)
    return values, {(s, p): row for s, p, row in zip(sample.tolist(), position.tolist(), dlogits, strict=True)}


def packed():
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    batch = MicroBatch(Sequences(starts), 8)
    values, dlogits = run(torch.cat(LOGITS), torch.cat(DPROBS), None, batch, int(starts[-1]), 1)
    return values, dict(zip([(s, p) for s, n in enumerate(LENGTHS) for p in range(n)], dlogits, strict=True))


def one_by_one():
    found = [run(x, d, None, MicroBatch(Sequences(), 8), len(x), 1) for x, d in zip(LOGITS, DPROBS, strict=True)]
    return torch.cat([values for values, _ in found]), {(s, p): row for s, (_, rows) in enumerate(found) for p, row in enumerate(rows)}


def flat(gradients):
    """Of the true tokens, in order; padding must have none."""
    true = [(s, p) for s, n in enumerate(LENGTHS) for p in range(n)]
    assert not any(row.any() for place, row in gradients.items() if place not in set(true))
    return torch.stack([gradients[place] for place in true])


@functools.cache
def expected():
    values, gradients = one_by_one()
    return values, flat(gradients)


@pytest.mark.parametrize("how", [packed, lambda: padded(40), lambda: padded(64)], ids=["packed", "padded", "padded more"])
def test_packing_and_padding_change_nothing(how):
    values, gradients = how()
    assert_same_bytes((values, flat(gradients)), expected())


def on_ranks(context, slices, work=padded):
    """Each rank's values, and the gradients of all."""

    def main(rank):
        groups = [dist.new_group(range(s, context * slices, slices)) for s in range(slices)]
        tensors = [dist.new_group(range(c * slices, (c + 1) * slices)) for c in range(context)]
        own = {"context": groups[rank % slices], "tensor": tensors[rank // slices], "block": dist.group.WORLD}
        return work(48, Sequences(None, rank // slices, context), slices, **own)

    results = run_ranks(context * slices, main, timeout=300)
    for values, _ in results:
        assert_same_bytes(values, results[0][0], "all ranks know the whole sample")
    return results[0][0], flat({place: row for _, rows in results for place, row in rows.items()})


@pytest.mark.parametrize("context, slices", [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.full), pytest.param(1, 4, marks=pytest.mark.full)])
def test_ranks_that_hold_parts_of_a_sample_change_nothing(context, slices):
    assert_same_bytes(on_ranks(context, slices), expected())


def test_planted_orders_are_caught(monkeypatch):
    """A row sum as one chain; counts of this rank alone."""
    true = expected()

    def chain(logits, weights, samples):
        p = reference.scores(logits)
        return p * (weights[samples] - (p * weights[samples]).cumsum(1)[:, -1:])

    with monkeypatch.context() as patch:
        patch.setattr(balance, "balance_backward", chain)
        assert first_mismatch(flat(one_by_one()[1]), true[1])
    with monkeypatch.context() as patch:
        patch.setattr(balance.collectives, "all_gather", lambda x, group: x)
        values, _ = padded(48, Sequences(None, 0, 2))
        assert first_mismatch(values, true[0])


def test_a_scaled_loss_scales_it():
    x, ids = LOGITS[0].clone().requires_grad_(), route_tokens(LOGITS[0], K, normalise=True)[0]
    grads = []
    for scale in (balance.one, lambda: 8.0):
        where = {"batch": MicroBatch(Sequences(), 8), "length": len(x), "samples": 1, "slices": 1, "padding": None}
        probs, _ = add_balance_loss(torch.zeros(len(x), K, requires_grad=True), x, ids, **where, coefficient=0.1, scale=scale)
        grads.append(torch.autograd.grad(probs.sum(), x)[0])
    assert_same_bytes(grads[1], grads[0] * 8)
    assert balance_weights(torch.zeros(1, 2 * E + 1, dtype=torch.int64), 0.1).isfinite().all()


@pytest.mark.parametrize("tail, padded_inside", [(1, False), (0, True)])
def test_packed_padding_needs_a_mask(tail, padded_inside):
    batch = MicroBatch(Sequences(torch.tensor([0, 40])), 8, padded=padded_inside)
    logits = torch.randn(40 + tail, E)
    ids, probs = route_tokens(logits, K, normalise=True)
    where = {"batch": batch, "length": 40 + tail, "samples": 1, "slices": 1, "coefficient": 0.1}
    with pytest.raises(ValueError, match="pass padding_mask"):
        add_balance_loss(probs, logits, ids, **where, padding=None)
    assert add_balance_loss(probs, logits, ids, **where, padding=torch.arange(40 + tail) >= 39)[1].shape == (1 + tail,)
