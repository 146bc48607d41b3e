"""The table of layouts: every trainer's against every rollout's, by the contract and in the stock packages' way, with the time of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tio_megatron.verify.ascend.block import Attend, Block, Layout, layouts, ours, roll, stock, train
from tio_megatron.verify.ascend.place import Place

Work = Callable[[Block, Layout, int, dist.ProcessGroup | None, Attend], Tensor]


def rows(place: Place, rank: int, size: int) -> list[dict[str, Any]]:
    """One row for each pair; the results are rank 0's. Every rank calls this."""
    block = Block(place)
    fitting = layouts(size)
    groups = {n: dist.new_group(list(range(n))) for n in sorted({layout.tp for layout in fitting})}
    table: list[dict[str, Any]] = []
    for side, work in (("tio", ours), ("stock", stock)):
        trained = [_one(place, block, work, layout, rank, groups, train) for layout in fitting]
        rolled = [_one(place, block, work, layout, rank, groups, roll) for layout in fitting]
        for a, first in zip(fitting, trained, strict=True):
            for b, second in zip(fitting, rolled, strict=True):
                table.append({"side": side, "trainer": str(a), "rollout": str(b)} | _compare(first, second))
    return table


def _one(
    place: Place, block: Block, work: Work, layout: Layout, rank: int, groups: dict[int, dist.ProcessGroup], attend: Attend
) -> tuple[Tensor | None, float, str]:
    """Result, milliseconds and, if there is none, why. All ranks of the layout fail together, since they do the same."""
    result: tuple[Tensor | None, float, str] = (None, 0.0, "")
    if rank < layout.tp:
        group = groups[layout.tp] if layout.tp > 1 else None
        try:
            got = work(block, layout, rank, group, attend)
            result = (got, place.time(lambda: work(block, layout, rank, group, attend)), "")
        except (RuntimeError, ValueError) as error:
            result = (None, 0.0, f"not available: {str(error).splitlines()[0]}")
    dist.barrier()
    return result


def _compare(first: tuple[Tensor | None, float, str], second: tuple[Tensor | None, float, str]) -> dict[str, Any]:
    a, b = first[0], second[0]
    if a is None or b is None:
        return {"problem": first[2] or second[2], "tokens": 0, "differ": 0, "max_logdiff": 0.0, "ms": 0.0}
    differ = int((a.cpu().view(torch.int32) != b.cpu().view(torch.int32)).sum())
    gap = (a.double().cpu() - b.double().cpu()).abs().max().item()
    return {"problem": "", "tokens": a.numel(), "differ": differ, "max_logdiff": gap, "ms": first[1] + second[1]}
