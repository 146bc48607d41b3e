"""Advantages of samples against their group: GRPO, Dr. GRPO, RLOO. Group sums are exact, so the order of samples and ranks is free."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.rl.exact import Moments

BASELINES = ("mean", "leave-one-out")


def group_advantages(
    rewards: Tensor, groups: Tensor, *, divide_by_std: bool = True, baseline: str = "mean", epsilon: float = 1e-6, moments: Moments | None = None
) -> Tensor:
    """How much better than its group each sample is::

        A_i = r_i - mean                                  Dr. GRPO (divide_by_std=False)
        A_i = (r_i - mean) / (std + epsilon)              GRPO
        A_i = n / (n - 1) * (r_i - mean)                  RLOO: r_i minus the mean of the others (baseline="leave-one-out", divide_by_std=False)

    ``mean`` and ``std`` (n - 1 degrees of freedom) are rounded once from their exact values; then one rounding per operation. So equal rewards
    give exactly 0, and a group of one gives 0.

    Args:
        rewards: ``[N]`` fp32.
        groups: ``[N]`` int64, each sample's group from 0 on.
        divide_by_std: normalise by the group's standard deviation.
        baseline: ``"mean"`` or ``"leave-one-out"``.
        epsilon: added to the standard deviation.
        moments: of the *whole* batch, ``Moments.of(rewards, groups, G).over(group)``, where this rank has only a part of it.

    Returns:
        ``[N]`` fp32.

    Raises:
        ValueError: shapes, types or options that do not fit, or leave-one-out in a group of one.
    """
    if rewards.dtype != torch.float32 or rewards.dim() != 1 or groups.shape != rewards.shape:
        got = f"{rewards.dtype} {list(rewards.shape)} and {list(groups.shape)}"
        raise ValueError(f"group_advantages: rewards must be torch.float32 [N] and groups of the same shape, got {got}")
    if baseline not in BASELINES:
        raise ValueError(f"group_advantages: baseline {baseline!r} is unknown; use one of {BASELINES}")
    if moments is None:
        moments = Moments.of(rewards, groups, int(groups.max()) + 1 if len(groups) else 1)
    elif len(groups) and int(groups.max()) >= len(moments.counts()):
        raise ValueError(f"group_advantages: group {int(groups.max())}, but the moments are of {len(moments.counts())} groups")
    if bool((groups < 0).any()):
        raise ValueError("group_advantages: every sample belongs to a group; there is a negative number")
    advantages = rewards - moments.means()[groups]
    if baseline == "leave-one-out":
        counts = moments.counts()[groups]
        if (counts < 2).any():
            raise ValueError(f"group_advantages: leave-one-out needs two samples in every group; group {int(groups[counts < 2][0])} has one")
        advantages = (counts.float() / (counts - 1).float()) * advantages
    return advantages / (moments.deviations()[groups] + epsilon) if divide_by_std else advantages
