"""Questions to several devices: do vendor sums see the number of rows, and do moved bytes and our tree give one result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from tio_megatron.collectives import all_gather, all_reduce, all_to_all
from tio_megatron.kernels.exact import tree_sum
from tio_megatron.verify.ascend.answers import Answer, ask, same
from tio_megatron.verify.ascend.place import Place


def questions(place: Place, group: dist.ProcessGroup) -> Iterator[Answer]:
    """Every rank asks together, and all of them get the same answer: a rank that alone stopped would leave the others waiting."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    width = place.width
    parts = [place.random(max(place.rows), width, seed=100 + r).float() for r in range(size)]
    mine = parts[rank]

    def vendor_rows(dtype: torch.dtype) -> str | None:
        whole = _vendor(mine.to(dtype))
        got = [_vendor(mine[:rows].to(dtype)) for rows in place.rows]
        for rows, part in zip(place.rows, got, strict=True):
            same(part, whole[:rows], f"{rows} of {whole.shape[0]} rows, {dtype}")
        return None

    def vendor_again() -> None:
        first = _vendor(mine)
        again = [_vendor(mine) for _ in range(place.repeats)]
        for i, other in enumerate(again):
            same(other, first, f"run {i + 2}")

    def ours() -> None:
        want = tree_sum(torch.stack([part.cpu() for part in parts]))
        got = {schedule: all_reduce(mine, group, schedule=schedule) for schedule in ("doubling", "scatter", "ring")}
        few = all_reduce(mine[:1], group)
        for schedule, total in got.items():
            same(total.cpu(), want, f"schedule {schedule} against the tree on one machine")
        same(few.cpu(), want[:1], "one row against many")

    def moves() -> None:
        rows = mine[: 2 * size].bfloat16() if mine.shape[0] >= 2 * size else mine[:size].bfloat16()
        each = rows.shape[0] // size
        gathered, swapped = all_gather(rows, group), all_to_all(rows, None, None, group)
        same(gathered.cpu(), torch.cat([part[: rows.shape[0]] for part in parts]).bfloat16().cpu(), "all-gather")
        same(swapped.cpu(), torch.cat([part[rank * each : (rank + 1) * each] for part in parts]).bfloat16().cpu(), "all-to-all")

    yield ask("moved bytes and our tree: every schedule, and one row as many", ours)
    yield ask("moves: all-gather and all-to-all bring the rows as they were", moves)
    yield ask("vendor all-reduce: the same from run to run", vendor_again, needed=False)
    yield ask("vendor all-reduce, bf16: does not see the number of rows", lambda: vendor_rows(torch.bfloat16), needed=False)
    yield ask("vendor all-reduce, fp32: does not see the number of rows", lambda: vendor_rows(torch.float32), needed=False)


def _vendor(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total
