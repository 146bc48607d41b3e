"""What makes a training step one that must not happen: found out by all ranks together, before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.collectives import wire
from tio_megatron.layers.gradient_sums import BadGradient


@dataclass
class Seen:
    """What the loss functions of this step returned on this rank: how often they ran, and their counts of tokens where they gave one.

    ``weighted``: the losses are weighted already, and the tokens divide nothing.
    """

    losses: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    weighted: bool = False


def refuse_bad_step(foreign: Sequence[str], bad: Sequence[str], seen: Sequence[Seen]) -> None:
    """The same error on all ranks of the world if any of them has seen something wrong; all of them call this.

    Args:
        foreign: names of this rank's parameters whose gradient came from elsewhere.
        bad: what is wrong with this rank's partials, one line each.
        seen: of this rank's buffers.

    Raises:
        ValueError: a loss function returned no count of tokens, or the whole batch has none.
        RuntimeError: a gradient came from a layer that is not ours.
        BadGradient: a partial is NaN, infinite or too large, or there are too many.
    """
    losses, counted = sum(one.losses for one in seen), [count for one in seen for count in one.tokens]
    tokens = sum(int(count.sum()) for count in counted)
    weighted = any(one.weighted for one in seen)
    found = torch.tensor([losses, len(counted), tokens, weighted, len(foreign), len(bad)], device=wire.device(dist.group.WORLD))
    if dist.get_world_size() > 1:
        dist.all_reduce(found)
    losses, counts, tokens, weighted, strangers, spoiled = found.tolist()
    if losses > counts:
        raise ValueError(
            f"{losses - counts} of {losses} losses of this step came without their number of tokens, so nothing says what to divide by. Nothing was changed: "
            "let the loss function return (sum of the losses, number of tokens, report)"
        )
    if losses and not tokens and not weighted:
        raise ValueError(
            "no token of this batch counts: the loss functions returned 0 tokens on all ranks, and a step without a gradient would still decay the "
            "weights. Nothing was changed: leave the batch out (or, for losses that are weighted already, use finalize_weighted_grads)"
        )
    if strangers:
        raise RuntimeError(f"gradient through autograd, from a layer that is not ours, so its order is unknown ({_everywhere(foreign)}). Nothing was changed")
    if spoiled:
        raise BadGradient(
            f"this step's gradients cannot be used ({_everywhere(bad)}). Nothing was changed: "
            "call zero_grad_buffer(), and skip the batch or lower the learning rate"
        )


def _everywhere(lines: Sequence[str]) -> str:
    """The first few of all ranks' ``lines``, the same text on each. Called by all ranks."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, list(lines))
    joined = [f"rank {rank}: {line}" for rank, theirs in enumerate(each) for line in theirs]
    return "; ".join(joined[:4]) + (f"; and {len(joined) - 4} more" if len(joined) > 4 else "")
