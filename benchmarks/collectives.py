"""All-reduce and reduce-scatter in the tree's order, and the all-to-all of experts, against gloo's own, at 2 and 4 ranks of one thread each.

Stock and ours take turns within one run. Ours is called as the layers call it, so it pays for its result; gloo works in place.

    python benchmarks/run.py collectives      the rows with their goals
    python benchmarks/collectives.py          every schedule at every size: where `auto` should switch
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tio_megatron import collectives  # noqa: E402
from tio_megatron.contract import ReductionTree  # noqa: E402
from tio_megatron.testing import first_mismatch, run_ranks  # noqa: E402

RANKS = (2, 4)
SIZES = (("4 KiB", 1 << 12), ("64 KiB", 1 << 16), ("1 MiB", 1 << 20), ("4 MiB", 1 << 22), ("16 MiB", 1 << 24), ("64 MiB", 1 << 26))
MOVED = (("64 KiB", 1 << 16), ("1 MiB", 1 << 20), ("16 MiB", 1 << 24), ("64 MiB", 1 << 26))
"""Of the reduce-scatters and expert all-to-alls."""
SMALL, LARGE = 1.3, 1.8
"""Goals: at most this many times gloo's time up to 1 MiB, and above."""


def rows() -> list[dict[str, Any]]:
    """One row per number of ranks and size; no ratio where a byte is wrong."""
    found = []
    for ranks in RANKS:
        for (name, nbytes), (right, times) in zip(SIZES, run_ranks(ranks, _compare, ("auto",), timeout=300)[0], strict=True):
            goal = SMALL if nbytes <= 1 << 20 else LARGE
            ratio = over_gloo(times, "auto") if right else None
            note = f"{median(times['auto']) * 1e3:.2f} ms, gloo {median(times['gloo']) * 1e3:.2f} ms; {_sent(ranks, nbytes, scattered=False)}"
            found.append(
                {"name": f"all_reduce fp32, {name}, {ranks} ranks", "ratio": ratio, "goal": goal, "met": ratio is not None and ratio <= goal, "note": note}
            )
        for kind, results in run_ranks(ranks, _compare_others, timeout=300)[0].items():
            for (name, nbytes), (right, times) in zip(MOVED, results, strict=True):
                goal = SMALL if nbytes <= 1 << 20 else LARGE
                ratio = over_gloo(times, "ours") if right else None
                sent = _sent(ranks, nbytes, scattered=True) if kind == "reduce_scatter fp32" else f"sends {nbytes * (ranks - 1) // ranks} bytes a rank, as gloo"
                note = f"{median(times['ours']) * 1e3:.2f} ms, gloo {median(times['gloo']) * 1e3:.2f} ms; {sent}"
                found.append({"name": f"{kind}, {name}, {ranks} ranks", "ratio": ratio, "goal": goal, "met": ratio is not None and ratio <= goal, "note": note})
    return found


def _sent(ranks: int, nbytes: int, scattered: bool) -> str:
    ours = collectives.bytes_sent(ranks, nbytes // 4, scattered=scattered)
    return f"sends {ours} bytes a rank, a ring {nbytes * (ranks - 1) // ranks * (1 if scattered else 2)}"


def _compare_others(rank: int) -> dict[str, list[tuple[bool, dict[str, list[float]]]]]:
    """Reduce-scatter, and the all-to-all of an expert layer (bf16 rows of 2048, uneven by one row in eight), against gloo's own."""
    size, group = dist.get_world_size(), dist.group.WORLD
    found: dict[str, list[tuple[bool, dict[str, list[float]]]]] = {"reduce_scatter fp32": [], "expert all_to_all bf16": []}
    for _, nbytes in MOVED:
        turns = {"each": max(2, min(20, (4 << 20) // nbytes)), "turns": 9}
        terms = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(peer)) for peer in range(size)]
        want, x = ReductionTree(size).reduce(terms).chunk(size)[rank], terms[rank]
        del terms
        right = first_mismatch(collectives.reduce_scatter(x, group), want) is None
        out = torch.empty_like(want)
        calls: dict[str, Callable[[], Any]] = {"gloo": lambda out=out, x=x: dist.reduce_scatter_single(out, x, group=group)}
        calls["ours"] = lambda x=x: collectives.reduce_scatter(x, group)
        found["reduce_scatter fp32"].append((right, _take_turns(calls, **turns)))
        width = 2048
        each = max(1, nbytes // (2 * width) // size)
        more = each // 8
        # Every rank has some more rows for the next one and as many fewer for itself.
        to = [[each + more if peer == (source + 1) % size else each - more if peer == source else each for peer in range(size)] for source in range(size)]
        rows = [torch.full((sum(to[source]), width), float(source + 1), dtype=torch.bfloat16) for source in range(size)]
        expected = [to[source][rank] for source in range(size)]
        want = torch.cat([rows[source][: expected[source]] for source in range(size)])
        mine = rows[rank]
        del rows
        right = first_mismatch(collectives.all_to_all(mine, expected, to[rank], group), want) is None
        # Stock layers ask for a new result in each call, as ours do.
        calls = {
            "gloo": lambda want=want, mine=mine, expected=expected, to=to: dist.all_to_all_single(torch.empty_like(want), mine, expected, to[rank], group=group)
        }
        calls["ours"] = lambda mine=mine, expected=expected, to=to: collectives.all_to_all(mine, expected, to[rank], group)
        found["expert all_to_all bf16"].append((right, _take_turns(calls, **turns)))
    return found


def sweep() -> None:
    """Print every schedule's time in units of gloo's."""
    for ranks in RANKS:
        for (name, _), (right, times) in zip(SIZES, run_ranks(ranks, _compare, ("doubling", "scatter", "ring"), timeout=300)[0], strict=True):
            if not right:
                print(f"{ranks} ranks {name:>7}: bytes differ")
                continue
            rest = ", ".join(f"{schedule} {over_gloo(times, schedule):.2f}" for schedule in times if schedule != "gloo")
            print(f"{ranks} ranks {name:>7}: gloo {median(times['gloo']) * 1e3:8.3f} ms; {rest}", flush=True)


def over_gloo(times: dict[str, list[float]], schedule: str) -> float:
    """The median over the turns of our time in units of gloo's in the same turn, so that what else the machine does cancels."""
    return median([ours / gloo for ours, gloo in zip(times[schedule], times["gloo"], strict=True)])


def _compare(rank: int, schedules: tuple[str, ...]) -> list[tuple[bool, dict[str, list[float]]]]:
    size = dist.get_world_size()
    found = []
    for _, nbytes in SIZES:
        terms = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(peer)) for peer in range(size)]
        want, x = ReductionTree(size).reduce(terms), terms[rank]
        del terms
        right = all(first_mismatch(collectives.all_reduce(x, dist.group.WORLD, schedule=schedule), want) is None for schedule in schedules)
        stock = torch.zeros_like(x)
        calls: dict[str, Callable[[], Any]] = {"gloo": lambda stock=stock: dist.all_reduce(stock)}
        calls |= {schedule: lambda x=x, schedule=schedule: collectives.all_reduce(x, dist.group.WORLD, schedule=schedule) for schedule in schedules}
        found.append((right, _take_turns(calls, each=max(2, min(20, (4 << 20) // nbytes)), turns=15)))
    return found


def _take_turns(calls: dict[str, Callable[[], Any]], each: int, turns: int) -> dict[str, list[float]]:
    """Seconds per call, turn by turn. A turn makes ``each`` calls in a row, so that one badly scheduled moment does not decide."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(each):
                call()
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - began) / each)
    return times


if __name__ == "__main__":
    sweep()
