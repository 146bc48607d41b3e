"""Where fp32 ends: overflowing ratios, log-probabilities of -inf, and settings that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tio_megatron import rl
from tio_megatron.testing import assert_same_bytes

T = torch.tensor
INF, NAN = float("inf"), float("nan")
NONE = torch.zeros(1, dtype=torch.int64)


def clipped(advantage: float, **options: Any) -> tuple[float, torch.Tensor, bool, bool]:
    """Loss, gradient of the log-probability and flags of a token whose ratio is e^100, beside an ordinary one."""
    logprob = torch.zeros(2, requires_grad=True)
    found = rl.clipped_loss(rl.token_ratio(logprob, T([-100.0, 0.0])), T([advantage, 1.0]), **options)
    rl.weighted_sum(found.loss, T([0.5, 0.5])).backward()
    assert logprob.grad is not None and logprob.grad[1] == -0.5
    return found.loss[0].item(), logprob.grad[:1], bool(found.clipped[0]), bool(found.capped[0])


@pytest.mark.parametrize(
    "advantage, options, loss, flags",
    [
        (1.0, dict(), -T(1.2).item(), (True, False)),
        (-1.0, dict(dual=3.0), 3.0, (False, True)),
        (0.0, dict(), 0.0, (False, False)),
        (-0.0, dict(dual=3.0), 0.0, (False, False)),
        (0.0, dict(clip_high=INF), 0.0, (False, False)),
    ],
)
def test_a_ratio_that_overflows(advantage: float, options: dict[str, Any], loss: float, flags: tuple[bool, bool]) -> None:
    got, gradient, *found = clipped(advantage, **options)
    assert got == loss and tuple(found) == flags
    assert_same_bytes(gradient, torch.zeros(1))


def test_an_overflow_that_no_clip_holds_shows() -> None:
    """Negative control: without the dual clip the loss is infinite, and so is its gradient."""
    assert clipped(-1.0)[0] == INF and clipped(-1.0)[1].item() == INF


def test_clipped_loss_as_written_does_not_survive_it() -> None:
    """Negative control: autograd multiplies the 0 of the branch not taken with the infinite ratio."""
    logprob = torch.zeros(1, requires_grad=True)
    ratio = (logprob + 100.0).exp()
    torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum().backward()
    assert logprob.grad is not None and logprob.grad.isnan()


def test_two_that_agree_in_minus_infinity() -> None:
    x = T([-INF, -1.0])
    own = torch.zeros(2, dtype=torch.int64)
    one, zero = torch.ones(2), torch.zeros(2)
    given = x.clone().requires_grad_()
    ratios = rl.token_ratio(given, x), rl.sequence_ratio(given, x, own, 1)
    assert_same_bytes(tuple(r.detach() for r in ratios), (one, one))
    (ratios[0] + ratios[1]).sum().backward()
    assert given.grad is not None
    assert_same_bytes(given.grad, one + one)
    for level in ("token", "sequence", "geometric"):
        assert_same_bytes(rl.importance_weights(x, x, own, 1, level=level), one)
    for estimator in ("k1", "k2", "k3"):
        assert_same_bytes(rl.kl(x, x, estimator), zero)
    assert rl.token_ratio(T([-INF]), T([0.0])).item() == 0.0, "control: they do not agree"


def test_one_of_minus_infinity() -> None:
    p, q = T([-INF]), T([0.0])
    assert [rl.kl(p, q, e).item() for e in ("k1", "k2", "k3")] == [-INF, INF, INF]
    assert [rl.kl(q, p, e).item() for e in ("k1", "k2", "k3")] == [INF, INF, INF]
    for estimator in ("k1", "k2", "k3"):
        for bounds in (dict(bound=10.0), dict(log_bound=2.0), dict(bound=10.0, log_bound=20.0)):
            given = p.clone().requires_grad_()
            found = rl.kl(given, q, estimator, **bounds)
            found.sum().backward()
            assert found.isfinite().all() and given.grad is not None
            assert_same_bytes(given.grad, torch.zeros(1), f"{estimator} {bounds}")
    assert rl.kl(T([NAN]), q, bound=10.0).isnan().all(), "what is missing shows"


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: rl.kl(torch.zeros(2, 3), torch.zeros(3)), "kl: all must be of one shape.*logprob \\[2, 3\\], other \\[3\\]"),
    (lambda: rl.kl(torch.zeros(2), torch.zeros(2), bound=-1.0), "kl: bounds must be positive"),
    (lambda: rl.kl(torch.zeros(2), torch.zeros(2), log_bound=NAN), "kl: bounds must be positive"),
    (lambda: rl.token_ratio(torch.zeros(2, 3), torch.zeros(3)), "token_ratio: all must be of one shape"),
    (lambda: rl.sequence_ratio(torch.zeros(2), torch.zeros(1), torch.zeros(2, dtype=torch.int64), 1), "sequence_ratio: all must be of one shape"),
    (lambda: rl.clipped_loss(torch.ones(2, 3), torch.ones(2, 1)), "clipped_loss: all must be of one shape"),
    (lambda: rl.whiten(torch.ones(3), torch.zeros(2, 3, dtype=torch.int64)), "whiten: all must be of one shape"),
    (lambda: rl.importance_weights(torch.zeros(3), torch.zeros(1), torch.zeros(3, dtype=torch.int64), 1), "importance_weights: all must be of one shape"),
    *[
        (lambda level=level: rl.importance_weights(torch.zeros(1), torch.zeros(1), NONE + 4, 1, level=level), "runs from 4 to 4; it must stay between -1 and 0")
        for level in ("token", "sequence", "geometric")
    ],
    (lambda: rl.truncated(torch.ones(1), -1.0), "truncated: high must be above 0.*got -1.0"),
    (lambda: rl.truncated(torch.ones(1), NAN), "got nan"),
    (lambda: rl.masked(torch.ones(1), 2.0, 0.5), "masked: needs low <= high.*low 2.0 and high 0.5"),
    (lambda: rl.masked(torch.ones(1), NAN, 0.5), "masked: needs low <= high"),
    (lambda: rl.gae(torch.ones(1), torch.ones(1), NONE, gamma=-3, lam=7), "gamma and lam must lie between 0 and 1, got gamma -3 and lam 7"),
    (lambda: rl.gae(torch.ones(1), torch.ones(1), NONE, lam=NAN), "between 0 and 1"),
    (lambda: rl.token_logprob(torch.ones(1, 4), NONE, 4, temperature=1e-40), "temperature 1e-40 .* use 1e-05 or more"),
    (lambda: rl.token_entropy(torch.ones(1, 4), 4, temperature=1e39), "temperature must be a positive finite number"),
    (lambda: rl.weighted_sum(T([3e38, -3e38]), T([2.0, 2.0])), "weighted_sum: .* at \\[0\\] is beyond fp32"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_what_lies_beside_the_refusals_works() -> None:
    """Negative control: the nearest values that mean something."""
    assert rl.masked(torch.ones(1), 1.0, 1.0).item() == 1.0
    assert rl.truncated(torch.ones(1), INF).item() == 1.0
    assert rl.gae(torch.ones(1), torch.ones(1), NONE, gamma=0, lam=1)[0].item() == 0.0
    assert rl.token_logprob(T([[100.0, -100.0]]), NONE, 2, temperature=1e-5).item() == 0.0
    assert rl.weighted_sum(T([3e38, -3e38, 3e38]), torch.ones(3)).item() == T(3e38).item()
    assert rl.weighted_sum(T([INF, 1.0]), torch.ones(2)).item() == INF
    assert rl.weighted_sum(T([INF, -INF]), torch.ones(2)).isnan()
