"""Prompt and padding may hold anything: NaN and infinities there reach no other number, forward or backward, and their gradient is +0."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tio_megatron import rl
from tio_megatron.testing import assert_same_bytes

Tensor = torch.Tensor
N, S, V = 5, 12, 40
INF, NAN = float("inf"), float("nan")
FILLS = [NAN, INF, -INF]


def batch(fill: float) -> dict[str, Tensor]:
    """Logits, what was sampled, and per-token numbers; ``fill`` wherever there is no token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([12, 1, 7, 0, 4])
    sequence = torch.where(torch.arange(S) < lengths[:, None], torch.arange(N)[:, None], -1)
    logits, target = torch.randn(N, S, V, generator=generator) * 3, torch.randint(V, (N, S), generator=generator)
    old = rl.token_logprob(logits, target, V) + torch.randn(N, S, generator=generator) * 0.4
    advantages = rl.spread(torch.tensor([1.0, -0.7, 0.0, -2.0, 0.3]), sequence)
    found = dict(logits=logits, old=old, advantages=advantages, rewards=torch.randn(N, S, generator=generator), values=torch.randn(N, S, generator=generator))
    for x in found.values():
        x[sequence < 0] = fill
    return found | dict(sequence=sequence, target=target, lengths=lengths)


def estimate(estimator: str, **bounds: float) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    return lambda logprob, b: rl.kl(logprob, b["old"], estimator, **bounds)


def weight(logprob: Tensor, b: dict[str, Tensor], level: str) -> Tensor:
    return rl.importance_weights(logprob, b["old"], b["sequence"], N, level=level)


def whole(logprob: Tensor, b: dict[str, Tensor]) -> Tensor:
    """A loss with a correction and a divergence, put together before it is weighted."""
    loss = rl.clipped_loss(rl.token_ratio(logprob, b["old"]), b["advantages"], clip=0.1).loss
    return loss * rl.masked(rl.truncated(weight(logprob, b, "token"), 2.0), 0.5, 2.0) + 0.1 * rl.kl(logprob, b["old"], "k2")


LOSSES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "logprob": lambda logprob, b: logprob,
    "token ratio": lambda logprob, b: rl.token_ratio(logprob, b["old"]),
    "sequence ratio": lambda logprob, b: rl.sequence_ratio(logprob, b["old"], b["sequence"], N),
    "clip": lambda logprob, b: rl.clipped_loss(rl.token_ratio(logprob, b["old"]), b["advantages"]).loss,
    "dual clip": lambda logprob, b: rl.clipped_loss(rl.token_ratio(logprob, b["old"]), b["advantages"], clip=0.1, clip_high=0.2, dual=1.1).loss,
    "gspo": lambda logprob, b: rl.clipped_loss(rl.sequence_ratio(logprob, b["old"], b["sequence"], N), b["advantages"], clip=0.01).loss,
    "truncated ratio": lambda logprob, b: rl.truncated(rl.token_ratio(logprob, b["old"]), 1.2),
    "masked ratio": lambda logprob, b: rl.masked(rl.token_ratio(logprob, b["old"]), 0.8, 1.2),
    "whole": whole,
    **{name: estimate(name) for name in ("k1", "k2", "k3")},
    **{f"{name} bounded": estimate(name, bound=0.2, log_bound=0.5) for name in ("k1", "k2", "k3")},
}


def gradients(loss: Callable[[Tensor, dict[str, Tensor]], Tensor], b: dict[str, Tensor], sign: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum, and the gradients of log-probabilities and logits."""
    logits = b["logits"].clone().requires_grad_()
    logprob = rl.token_logprob(logits, b["target"], V, temperature=0.8)
    logprob.retain_grad()
    total = rl.weighted_sum(loss(logprob, b), rl.token_weights(b["sequence"], b["lengths"], "seq-mean-token-mean"))
    (total * sign).backward()
    assert logprob.grad is not None and logits.grad is not None
    return total.detach(), logprob.grad, logits.grad


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str, fill: float) -> None:
    ordinary, b = batch(0.25), batch(fill)
    absent = b["sequence"] < 0
    for sign in (1.0, -1.0):
        found = gradients(LOSSES[name], b, sign)
        assert all(x.isfinite().all() for x in found)
        assert found[2][~absent].any()
        for x in found[1:]:
            assert_same_bytes(x[absent], torch.zeros_like(x[absent]), f"{name}, {fill}")
        assert_same_bytes(found, gradients(LOSSES[name], ordinary, sign), f"{name}, {fill}")


@pytest.mark.parametrize("fill", FILLS)
def test_entropy_and_the_other_side_of_a_divergence(fill: float) -> None:
    b = batch(fill)
    absent, weights = b["sequence"] < 0, rl.token_weights(b["sequence"], b["lengths"])
    logits = b["logits"].clone().requires_grad_()
    rl.weighted_sum(-rl.token_entropy(logits, V), weights).backward()
    other = b["old"].clone().requires_grad_()
    for estimator in ("k1", "k2", "k3"):
        rl.weighted_sum(rl.kl(rl.token_logprob(b["logits"], b["target"], V), other, estimator), weights).backward()
    for x in (logits.grad, other.grad):
        assert x is not None and x.isfinite().all() and x[~absent].any()
        assert_same_bytes(x[absent], torch.zeros_like(x[absent]))


def by_sequence(b: dict[str, Tensor]) -> Iterator[Tensor]:
    """Everything that is given ``sequence``."""
    sequence, logprob = b["sequence"], rl.token_logprob(b["logits"], b["target"], V)
    yield from (weight(logprob, b, level) for level in ("token", "sequence", "geometric"))
    yield rl.sequence_ratio(logprob, b["old"], sequence, N)
    yield from rl.gae(b["rewards"], b["values"], sequence, gamma=0.9, lam=0.8)
    yield from (rl.whiten(b["rewards"], sequence, shift=shift) for shift in (True, False))
    yield rl.sequence_sums(b["old"], sequence, N)
    found = rl.Summary.of(b["old"], sequence)
    yield torch.tensor([found.count, found.mean, found.smallest, found.largest, found.nonzero])


@pytest.mark.parametrize("fill", FILLS)
def test_numbers_of_tokens(fill: float) -> None:
    found = tuple(by_sequence(batch(fill)))
    assert all(x.isfinite().all() for x in found)
    assert_same_bytes(found, tuple(by_sequence(batch(0.25))))


@pytest.mark.parametrize("fill", FILLS)
def test_formulas_as_written_spread_it(fill: float) -> None:
    """Negative control: the same clipped loss by torch's own operators, its padding weighted with 0 or left out."""
    b = batch(fill)
    b["logits"] = batch(0.0)["logits"]

    def plain(logprob: Tensor, b: dict[str, Tensor]) -> Tensor:
        ratio = (logprob - b["old"]).exp()
        return -torch.minimum(ratio * b["advantages"], ratio.clamp(0.8, 1.2) * b["advantages"])

    absent = b["sequence"] < 0
    assert gradients(plain, b)[2][absent].isnan().any()
    assert not gradients(LOSSES["clip"], b)[2][absent].any()
