"""Every formula of ``docs/rl.md`` written out in float64 with torch's own operators, against ours in fp32: a few units in the last place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tio_megatron import rl

Tensor = torch.Tensor
UNIT = 2.0**-24
"""Half the distance between 1 and the next fp32 number."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: Tensor, exact: Tensor, units: float, what: str = "") -> None:
    """Within ``units`` roundings of the larger of the value and 1 in ten thousand of the largest value."""
    exact = exact.detach()
    scale = exact.abs().clamp(min=1e-4 * float(exact.abs().max()) or 1.0)
    worst = float(((got.detach().double() - exact).abs() / scale).max()) / UNIT
    assert worst <= units, f"{what}: {worst:.1f} units"


def batch(n: int = 6, longest: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the learner and of the sampler, sequences, lengths."""
    lengths = torch.randint(1, longest + 1, (n,))
    sequence = torch.where(torch.arange(longest) < lengths[:, None], torch.arange(n)[:, None], -1)
    new = -torch.rand(n, longest) * 5
    return new, new + torch.randn(n, longest) * 0.3, sequence, lengths


@pytest.mark.parametrize("vocab, temperature", [(500, 1.0), (500, 0.6), (32000, 1.0)])
def test_logprob_and_entropy(vocab: int, temperature: float) -> None:
    logits, target, d = torch.randn(20, vocab) * 3, torch.randint(vocab, (20,)), torch.randn(2, 20)

    def stock(x: Tensor) -> tuple[Tensor, Tensor]:
        p = (x / temperature).log_softmax(-1)
        return p.gather(1, target[:, None])[:, 0], -(p.exp() * p).sum(-1)

    def error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
        return [float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]

    def gradients(function: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = logits.to(dtype).requires_grad_()
        values = function(x)
        return *(value.detach() for value in values), *(torch.autograd.grad(value, x, d[i].to(dtype), retain_graph=True)[0] for i, value in enumerate(values))

    exact = gradients(stock, torch.float64)
    ours = error(
        gradients(lambda x: (rl.token_logprob(x, target, vocab, temperature=temperature), rl.token_entropy(x, vocab, temperature=temperature)), torch.float32),
        exact,
    )
    theirs = error(gradients(stock, torch.float32), exact)
    for name, mine, other in zip(("logprob", "entropy", "logprob gradient", "entropy gradient"), ours, theirs, strict=True):
        assert mine <= max(1.3 * other, 3 * UNIT), f"{name}: ours {mine:.2e}, stock {other:.2e}"


def test_group_advantages() -> None:
    rewards, groups = torch.randn(64) * 3 + 10, torch.arange(64) % 8
    r = rewards.double().view(8, 8)
    mean, std = r.mean(0), r.std(0)
    others = (r.sum(0) - r) / 7
    rows = [
        (dict(), (r - mean) / (std + 1e-6)),
        (dict(divide_by_std=False), r - mean),
        (dict(divide_by_std=False, baseline="leave-one-out"), r - others),
        (dict(baseline="leave-one-out", epsilon=0.1), (r - others) / (std + 0.1)),
    ]
    for options, exact in rows:
        got = rl.group_advantages(rewards, groups, **options)
        assert (got.double() - exact.reshape(-1)).abs().max() < 1e-6, "the mean, near 10, is rounded to 5e-7"


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    _, _, sequence, lengths = batch()
    rewards, values = torch.randn(2, *sequence.shape)
    advantages, returns = rl.gae(rewards, values, sequence, gamma=gamma, lam=lam)
    for row, n in enumerate(lengths.tolist()):
        r, v = rewards[row, :n].double(), values[row, :n].double()
        deltas = r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
        exact = torch.stack([sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])
        assert (advantages[row, :n].double() - exact).abs().max() < 3e-6
        assert (returns[row, :n].double() - (exact + v)).abs().max() < 3e-6


def test_whiten() -> None:
    x, _, sequence, _ = batch()
    there = sequence >= 0
    kept = x.double()[there]
    exact = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    assert (rl.whiten(x, sequence)[there].double() - exact).abs().max() < 4e-7
    assert (rl.whiten(x, sequence, shift=False)[there].double() - (exact + kept.mean())).abs().max() < 6e-7


def by_sequence(x: Tensor, lengths: Tensor, mean: bool) -> Tensor:
    """Sums or means over true tokens, spread over whole rows."""
    there = torch.arange(x.shape[1]) < lengths[:, None]
    total = (x * there).sum(1, keepdim=True)
    return (total / lengths[:, None] if mean else total).expand_as(x)


def test_ratios_and_importance_weights() -> None:
    new, old, sequence, lengths = batch()
    there = sequence >= 0
    diff = (new - old).double()
    exact = {"token": diff.exp(), "sequence": by_sequence(diff, lengths, False).exp(), "geometric": by_sequence(diff, lengths, True).exp()}
    for level, true in exact.items():
        close(rl.importance_weights(new, old, sequence, 6, level=level)[there], true[there], 12, level)
    close(rl.token_ratio(new, old)[there], exact["token"][there], 3)
    close(rl.sequence_ratio(new, old, sequence, 6)[there], exact["geometric"][there], 4)


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    new, old, sequence, lengths = batch()
    advantages = torch.randn(6)
    given, true = new.clone().requires_grad_(), new.double().requires_grad_()
    ratio = rl.sequence_ratio(given, old, sequence, 6)
    loss = rl.clipped_loss(ratio, rl.spread(advantages, sequence), clip=0.03, clip_high=0.04).loss
    rl.weighted_sum(loss, rl.token_weights(sequence, lengths, "seq-mean-token-mean")).backward()
    s = by_sequence(true - old.double(), lengths, True)[:, 0].exp()
    a = advantages.double()
    (-torch.minimum(s * a, s.clamp(0.97, 1.04) * a).mean()).backward()
    assert given.grad is not None and true.grad is not None and 0 < int((true.grad == 0).all(1).sum()) < 6, "some are clipped, some are not"
    close(given.grad, true.grad, 12)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clipped_loss(dual: float | None) -> None:
    ratio, advantages = (torch.randn(4000) * 0.6).exp(), torch.randn(4000) * 2
    given, true = ratio.clone().requires_grad_(), ratio.double().requires_grad_()
    a = advantages.double()
    objective = torch.minimum(true * a, true.clamp(0.8, 1.28) * a)
    if dual is not None:
        objective = torch.where(a < 0, torch.maximum(objective, dual * a), objective)
    loss = rl.clipped_loss(given, advantages, clip=0.2, clip_high=0.28, dual=dual).loss
    close(loss, -objective, 3)
    weight = torch.rand(4000)
    (loss * weight).sum().backward()
    (-objective * weight.double()).sum().backward()
    assert given.grad is not None and true.grad is not None
    close(given.grad, true.grad, 3)


def test_kl() -> None:
    p = -torch.rand(4000) * 4
    for spread in (1e-4, 1e-2, 0.3, 3.0):
        q = p + torch.randn(4000) * spread
        given, true = p.clone().requires_grad_(), p.double().requires_grad_()
        r = (q - p).double()  # of the fp32 difference: what is measured is the estimator
        exact = {"k1": -r, "k2": r * r / 2, "k3": torch.expm1(r) - r}
        slope = {"k1": torch.ones_like(r), "k2": -r, "k3": -torch.expm1(r)}
        for name, true in exact.items():
            found = rl.kl(given, q, name)
            (gradient,) = torch.autograd.grad(found.sum(), given)
            if name == "k3":
                assert ((found.double() - true).abs() <= 8 * UNIT * true + 1e-12).all(), (name, spread)
            else:
                close(found, true, 3, name)
            close(gradient, slope[name], 5, f"gradient of {name}")


def test_token_weights_and_the_weighted_sum() -> None:
    losses, _, sequence, lengths = batch()
    x = losses.double()
    there = torch.arange(50) < lengths[:, None]
    per_sequence = (x * there).sum(1)
    exact = {
        "token-mean": per_sequence.sum() / lengths.sum(),
        "seq-mean-token-mean": (per_sequence / lengths).mean(),
        "seq-mean-token-sum": per_sequence.mean(),
        "seq-mean-token-sum-norm": (per_sequence / 50).mean(),
    }
    for mode, true in exact.items():
        weights = rl.token_weights(sequence, lengths, mode, horizon=50 if mode.endswith("norm") else None)
        got = rl.weighted_sum(losses, weights)
        assert abs(float(got) - float(true)) < 1e-6 * abs(float(true)), mode
