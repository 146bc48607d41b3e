"""Ranks add the integers of exact sums. Integers have no order, so any collective of anybody will do; messages are cut to a bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.layers.grains import Group, size

MESSAGE = 1 << 23
"""Integers in one message (64 MiB), unless one tensor alone has more."""


def add_over(parts: Sequence[Tensor], group: Group) -> None:
    """Add int64 tensors of any shape, each in its place, over ``group``; nothing to do for one rank.

    Args:
        parts: the same shapes on every rank.
        group: ``None`` is one rank.
    """
    if size(group) == 1:
        return
    waiting: list[Tensor] = []
    for part in parts:
        if waiting and sum(one.numel() for one in waiting) + part.numel() > MESSAGE:
            _add(waiting, group)
            waiting = []
        waiting.append(part)
    if waiting:
        _add(waiting, group)


def _add(parts: Sequence[Tensor], group: Group) -> None:
    joined = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(joined, group=group)
    for part, found in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.copy_(found.view(part.shape))
