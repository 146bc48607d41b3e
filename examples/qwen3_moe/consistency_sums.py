"""Collectives of many sizes, each against the tree that it promises, made here from the parts of all ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tio_megatron.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from tio_megatron.kernels.math import tree_add

SCHEDULES = ("auto", "doubling", "scatter", "ring")
MOST = 1 << 14
"""Elements a rank in a soak."""


@dataclass(frozen=True)
class Sums:
    """Of one size: digests by the way they were made, the tree's, and that of torch's own all-reduce."""

    elements: int
    found: dict[str, str]
    tree: str
    vendor: str

    @property
    def equal(self) -> bool:
        """Whether every way gives the tree."""
        return set(self.found.values()) == {self.tree}


def part(rank: int, elements: int, seed: int = 0) -> torch.Tensor:
    """What a rank adds: numbers of very different sizes, the same wherever they are made."""
    made = torch.Generator().manual_seed((seed * 1009 + rank) * 1000 + elements % 997)
    return torch.randn(elements, generator=made) * torch.exp2(torch.randint(-12, 12, (elements,), generator=made).float())


def tree(elements: int, seed: int = 0) -> torch.Tensor:
    """The contract's sum of all ranks' parts, [elements]; made by this rank alone."""
    return tree_add(torch.stack([part(rank, elements, seed) for rank in range(dist.get_world_size())]))


def digest(tensor: torch.Tensor) -> str:
    """Of its bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def sums(elements: int) -> Sums:
    """All-reduces and a reduce-scatter of ``elements`` a rank, by every schedule. Every rank calls it."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    mine = part(dist.get_rank(), elements * ranks)
    found = {schedule: digest(all_reduce(mine.clone(), group, schedule=schedule)) for schedule in SCHEDULES}
    found["scattered"] = digest(all_gather(reduce_scatter(mine.clone(), group), group))
    vendor = mine.clone()
    dist.all_reduce(vendor)
    return Sums(elements, found, digest(tree(elements * ranks)), digest(vendor))


def soak(names: Sequence[str], seconds: float, began: Callable[[], None]) -> tuple[int, int]:
    """Collectives until rank 0 says that ``seconds`` have passed. Every rank calls it.

    Args:
        names: of ``COLLECTIVES``.
        seconds: how long.
        began: called once all of them have come back for the first time.

    Returns:
        How many there were, and how many gave other bytes than they should.
    """
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    sizes = torch.Generator().manual_seed(1)
    end, count, wrong = time.monotonic() + seconds, 0, 0
    for turn in range(10**9):
        elements = int(torch.randint(1, MOST, (1,), generator=sizes))
        mine, wanted = part(rank, elements * ranks, turn), tree(elements * ranks, turn)
        for name in names:
            count += 1
            wrong += not _right(name, mine, wanted, elements)
        if turn == 0:
            began()
        left = all_gather(torch.tensor([end - time.monotonic()], dtype=torch.float64), group)
        if left[0] <= 0:
            break
    return count, wrong


def _right(name: str, mine: torch.Tensor, wanted: torch.Tensor, elements: int) -> bool:
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    own = wanted[rank * elements : (rank + 1) * elements]
    if name in SCHEDULES:
        found = all_reduce(mine.clone(), group, schedule=name)
    elif name == "reduce_scatter":
        found, wanted = reduce_scatter(mine.clone(), group), own
    elif name == "all_gather":
        found = all_gather(own.clone(), group)
    elif name == "all_to_all":  # everybody sends the same, so each piece comes back as this rank's own
        found, wanted = all_to_all(wanted.clone(), None, None, group), own.repeat(ranks)
    else:
        raise ValueError(f"soak: no collective {name!r}")
    return digest(found) == digest(wanted)
