"""Generalised advantage estimation: one backward recursion per sequence, the same whichever row or pack the sequence lies in."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every token::

        delta_t = (r_t + gamma * V_next) - V_t
        A_t     = delta_t + (gamma * lam) * A_next
        R_t     = A_t + V_t

    ``next`` is the next token of the same sequence in the row, over places marked -1 if need be; behind the last one both are 0.
    One rounding per operation in fp32; ``gamma * lam`` is rounded once from float64.

    Args:
        rewards, values: ``[..., S]`` fp32.
        sequence: ``[..., S]`` int64. The tokens of a sequence lie in one row, in ascending position; a row may pack several.
        gamma: the discount, 0 to 1.
        lam: the decay of the estimator, 0 to 1.

    Returns:
        advantages and returns, ``[..., S]`` fp32; 0 where there is no token. Not differentiable.

    Raises:
        ValueError: types or shapes that do not fit, ``gamma`` or ``lam`` outside their range.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gae: gamma and lam must lie between 0 and 1, got gamma {gamma} and lam {lam}")
    for name, x in (("rewards", rewards), ("values", values)):
        if x.dtype != torch.float32 or x.shape != sequence.shape:
            raise ValueError(f"gae: {name} must be torch.float32 of shape {list(sequence.shape)}, got {x.dtype} of {list(x.shape)}")
    rewards, values = rewards.detach(), values.detach()
    discount, decay = torch.tensor(gamma, dtype=torch.float32), torch.tensor(gamma * lam, dtype=torch.float32)
    none = torch.zeros(sequence.shape[:-1])
    value, advantage, owner = none, none, torch.full(sequence.shape[:-1], -1, dtype=torch.int64)
    found = []
    for t in range(sequence.shape[-1] - 1, -1, -1):
        here = sequence[..., t]
        token, same = here >= 0, here == owner
        delta = (rewards[..., t] + discount * torch.where(same, value, none)) - values[..., t]
        step = delta + decay * torch.where(same, advantage, none)
        found.append(torch.where(token, step, none))
        value, advantage, owner = (torch.where(token, a, b) for a, b in ((values[..., t], value), (step, advantage), (here, owner)))
    advantages = torch.stack(found[::-1], -1) if found else torch.empty(sequence.shape)
    return advantages, torch.where(sequence >= 0, advantages + values, torch.zeros(()))
