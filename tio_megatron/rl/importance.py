"""Weights that correct for tokens drawn from another policy than the trainer's: the rollout engine's. With bytes that agree they are 1.

``w = p_trainer / p_rollout`` of a token, or of a whole sequence; cut off above (truncated, TIS) or dropped outside a band (masked, MIS).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels import math as kernel
from tio_megatron.layers.grains import Group
from tio_megatron.rl.exact import check_index
from tio_megatron.rl.ratio import log_ratio
from tio_megatron.rl.sequences import one_shape, sequence_means, sequence_sums, spread

LEVELS = ("token", "sequence", "geometric")


def importance_weights(trainer: Tensor, rollout: Tensor, sequence: Tensor, sequences: int, *, level: str = "token", group: Group = None) -> Tensor:
    """One weight per token, from the log-probabilities ``trainer`` and ``rollout`` give the sampled tokens::

        token       exp(trainer - rollout)
        sequence    exp(sum over the sequence's tokens)         unbiased, of high variance
        geometric   exp(mean over the sequence's tokens)

    Args:
        trainer, rollout: fp32, one number per token.
        sequence: int64 of the same shape; -1 is no token, and its weight is 0.
        sequences: ``N``.
        level: one of the three above. Sums and means are exact, rounded once.
        group: ranks that hold other tokens of the same sequences.

    Returns:
        fp32, constant for the gradient.

    Raises:
        ValueError: an unknown level, shapes that differ, or a sequence outside -1 .. ``N`` - 1.
    """
    if level not in LEVELS:
        raise ValueError(f"importance_weights: level {level!r} is unknown; use one of {LEVELS}")
    one_shape("importance_weights", trainer=trainer, rollout=rollout, sequence=sequence)
    check_index("importance_weights: sequence", sequence, sequences)
    logs = log_ratio(trainer.detach(), rollout.detach())
    if level != "token":
        reduce = sequence_sums if level == "sequence" else sequence_means
        logs = spread(reduce(logs, sequence, sequences, group=group), sequence)
    return torch.where(sequence >= 0, kernel.exp(logs), torch.zeros(()))


def truncated(weights: Tensor, high: float) -> Tensor:
    """``min(w, high)``. NaN stays NaN.

    Raises:
        ValueError: ``high`` is not above 0.
    """
    if not high > 0:
        raise ValueError(f"truncated: high must be above 0 (customary: 2), got {high}")
    return weights.clamp(max=high)


def masked(weights: Tensor, low: float, high: float) -> Tensor:
    """``w`` where ``low <= w <= high``, else 0: such tokens, or sequences, do not teach. NaN becomes 0 as well.

    Raises:
        ValueError: a band that nothing lies in.
    """
    if not (low <= high and high > 0):
        raise ValueError(f"masked: needs low <= high and high > 0 (customary: 0.5 and 2), got low {low} and high {high}")
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros(()))
