"""Many collectives of random sizes, dtypes and groups, some delayed: equal bytes, and neither memory nor file descriptors grow."""

from __future__ import annotations

import mmap
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from tio_megatron import collectives
from tio_megatron.contract import ReductionTree
from tio_megatron.testing import assert_same_bytes, run_ranks

WARM = 20
"""Calls before the first look: connections are made, buffers found."""
GROWTH = 24 << 20
"""Bytes a process may grow by afterwards: the allocator's slack, of which one kept message would use up several."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8]


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def part(seed: int, rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank of the world puts in, wherever it is made."""
    made = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return made if dtype == torch.float32 else (made * 50).abs().to(dtype)


def soak(rank: int, calls: int) -> tuple[int, int]:
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1, 2], [0, 1], [1, 2], [0, 2])]
    drawn, start = random.Random(7), (0, 0)
    for call in range(calls):
        if call == WARM:
            start = resident(), open_files()
        ranks, group = drawn.choice(groups)
        kind, dtype = drawn.choice(["sum", "scattered", "gather", "all_to_all"]), drawn.choice(DTYPES)
        rows = len(ranks) * drawn.choice([1, 7, 300, 9000, 40_000])
        schedule, late = drawn.choice(["doubling", "scatter", "ring"]), drawn.choice([None, None, *ranks])
        if rank == late:
            time.sleep(0.02)
        if rank not in ranks:
            continue
        here, share = ranks.index(rank), rows // len(ranks)
        parts = [part(call, other, rows, torch.float32 if kind in ("sum", "scattered") else dtype) for other in ranks]
        cut = slice(here * share, (here + 1) * share)
        if kind == "sum":
            found, wanted = collectives.all_reduce(parts[here], group, schedule=schedule), ReductionTree(len(ranks)).reduce(parts)
        elif kind == "scattered":
            how = "scatter" if schedule == "doubling" else schedule
            found, wanted = collectives.reduce_scatter(parts[here], group, schedule=how), ReductionTree(len(ranks)).reduce(parts)[cut]
        elif kind == "gather":
            found, wanted = collectives.all_gather(parts[here], group), torch.cat(parts)
        else:
            found, wanted = collectives.all_to_all(parts[here], None, None, group), torch.cat([each[cut] for each in parts])
        assert_same_bytes(found, wanted, f"call {call}: {kind} over {ranks}, {rows} rows")
    return resident() - start[0], open_files() - start[1]


@pytest.mark.parametrize("calls", [60, pytest.param(220, marks=pytest.mark.full)])
def test_nothing_grows(calls):
    for memory, files in run_ranks(3, soak, calls, timeout=300):
        assert memory < GROWTH and files <= 0, (memory, files)


def test_the_looks_are_not_blind():
    before = resident(), open_files()
    with mmap.mmap(-1, GROWTH) as held, open("/proc/self/statm"):  # pages of its own: an allocator may have some left
        held.write(b"x" * GROWTH)
        assert resident() - before[0] > GROWTH // 2 and open_files() - before[1] == 1
