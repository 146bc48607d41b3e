"""Bytes sent, links used and memory held, counted and held against the formulas that the docstrings state.

Bytes are counted where they leave (``collectives/wire.py``, the only file that may name torch.distributed); memory by torch's profiler, which sees
every CPU allocation.
"""

from __future__ import annotations

import ast
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tio_megatron import collectives
from tio_megatron.collectives import scratch, wire
from tio_megatron.contract import ReductionTree
from tio_megatron.testing import run_ranks

SLACK = 4096
"""Small allocations of torch itself (scalars, events)."""


def peak(call) -> int:
    """The most bytes of CPU memory that ``call`` holds at one time, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    events = []

    def walk(nodes):
        for node in nodes:
            if node.name == "[memory]":
                events.append((node.start_time_ns, node.extra_fields.alloc_size))
            walk(node.children)

    walk(seen.profiler.kineto_results.experimental_event_tree())
    held = most = 0
    for _, size in sorted(events):
        held += size
        most = max(most, held)
    del kept
    return most


def test_the_counter_and_the_peak_are_not_blind():
    assert 8000 <= peak(lambda: torch.ones(1000) + torch.ones(500)[:1]) <= 12000

    def rank_main(rank):
        other, group, soon = torch.empty(3), dist.group.WORLD, time.monotonic() + 60
        sends, recvs = [(1 - rank, torch.ones(3)), (1 - rank, torch.ones(0))], [(1 - rank, other), (1 - rank, torch.empty(0))]
        counts = [3, 2] if rank else [2, 3]  # two to oneself
        for call in (
            lambda: wire.links(sends, recvs, group, soon),
            lambda: wire.all_to_all(torch.empty(5), counts, torch.ones(5), counts, group, soon),
        ):
            with wire.count() as traffic:
                call()
            assert (traffic.sent, traffic.messages, traffic.rounds, traffic.peers) == (12, 1, 1, {1 - rank: 12})

    run_ranks(2, rank_main)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("elements", [4096 * 12, 4096 * 12 + 5])
def test_bytes_and_memory_of_all_reduce(size, elements):
    whole, piece = 4 * elements, 4 * math.ceil(elements / size)
    rounds = math.ceil(math.log2(size))
    sent = {
        "doubling": whole * rounds if size != 3 else 2 * whole,  # of three ranks, the third serves two
        "scatter": 2 * piece * (size - 1),
        "ring": piece * (size - 1 + {2: 1, 3: 3, 4: 5}[size]),
    }
    packed = 2 * whole if size == 3 else 0  # what one of three ranks sends to two, or three ranks to all, is packed
    held = {"doubling": whole * (1 if size == 2 else 2) + packed, "scatter": piece * size + packed // 2, "ring": piece * {2: 1, 3: 3, 4: 4}[size]}

    def rank_main(rank):
        x, group = torch.ones(elements), dist.group.WORLD
        out = torch.empty_like(x)
        for schedule in ("doubling", "scatter", "ring"):
            scratch.release()
            with wire.count() as traffic:
                first = peak(lambda s=schedule: collectives.all_reduce(x, group, schedule=s))
            assert traffic.sent <= sent[schedule], (schedule, traffic)
            assert traffic.sent == collectives.bytes_sent(size, elements, schedule=schedule, rank=rank)
            assert first <= whole + held[schedule] + SLACK, (schedule, first, whole, held)
            assert first >= whole + piece, "the first call must have allocated the result and its scratch"
            # In a steady state the result is all that is allocated, and with out= nothing is.
            again = peak(lambda s=schedule: collectives.all_reduce(x, group, schedule=s))
            assert whole <= again <= whole + (0 if schedule == "ring" else packed) + SLACK
            if not packed or schedule == "ring":
                assert peak(lambda s=schedule: collectives.all_reduce(x, group, schedule=s, out=out)) <= SLACK
            if schedule == "ring" and size > 2:
                assert set(traffic.peers) == {(rank + 1) % size}, "neighbour links only"
        with wire.count() as traffic:
            collectives.all_reduce(x, group, schedule="scatter", out_dtype=torch.bfloat16)
        assert traffic.sent <= piece * (size - 1) * 3 // 2, "finished pieces travel rounded"

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_and_memory_of_the_rest(size):
    rows, width = 64 * size, 96
    whole = 4 * rows * width
    piece = whole // size
    tree = ReductionTree(2 * size + 1)

    def rank_main(rank):
        x, group = torch.ones(rows, width), dist.group.WORLD

        def measured(call):
            scratch.release()
            with wire.count() as traffic:
                return traffic, peak(call)

        traffic, most = measured(lambda: collectives.reduce_scatter(x, group))
        assert traffic.sent == piece * (size - 1) and traffic.rounds == 1 and most <= whole + piece + SLACK
        traffic, most = measured(lambda: collectives.all_gather(x[: rows // size], group))
        assert traffic.sent == piece * (size - 1) and traffic.rounds == size.bit_length() - 1 and most <= whole + SLACK
        traffic, most = measured(lambda: collectives.all_to_all(x, None, None, group))
        assert traffic.sent == piece * (size - 1) and traffic.rounds == 1 and most <= whole + SLACK
        bounds = [0, *range(3, 2 * size + 1, 2), 2 * size + 1]
        spans = [tree.frontier(lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
        nodes = len(spans[rank])
        stacked = x.expand(nodes, rows, width).contiguous()
        traffic, most = measured(lambda: collectives.all_reduce_nodes(stacked, spans, tree, group, schedule="scatter"))
        assert traffic.sent == piece * (size - 1) * (nodes + 1), "only nodes travel"
        assert most <= whole + piece * sum(map(len, spans)) + SLACK
        traffic, most = measured(lambda: collectives.reduce_scatter_nodes(stacked, spans, tree, group))
        assert traffic.sent == piece * (size - 1) * nodes

    run_ranks(size, rank_main)


def test_auto_switches_where_it_is_told(monkeypatch, term):
    def rank_main(rank):
        group, x = dist.group.WORLD, term(rank, 300)
        for switch, rounds in ((1200, 2), (1199, 3), (0, 3), (None, 2)):
            if switch is None:
                monkeypatch.delenv("TIO_COLLECTIVE_SWITCH_BYTES")
            else:
                monkeypatch.setenv("TIO_COLLECTIVE_SWITCH_BYTES", str(switch))
            with wire.count() as traffic:
                collectives.all_reduce(x, group)
            doubling = switch is None or switch >= 1200
            assert traffic.rounds == rounds and traffic.sent == (2400 if doubling else 1800)
        monkeypatch.setenv("TIO_COLLECTIVE_SCHEDULE", "ring")
        with wire.count() as traffic:
            collectives.all_reduce(x, group)
            collectives.reduce_scatter(x, group)
        assert set(traffic.peers) == {(rank + 1) % 4}
        monkeypatch.setenv("TIO_COLLECTIVE_SCHEDULE", "doubling")
        with wire.count() as traffic:
            collectives.reduce_scatter(x, group)
        assert traffic.sent == 900, "a reduce-scatter has no doubling and keeps its own choice"

    run_ranks(4, rank_main)


CALLED = {
    "wire.py": {"ProcessGroup", "get_rank", "get_world_size", "get_backend", "P2POp", "isend", "irecv", "batch_isend_irecv", "AllToAllOptions"},
    "last_words.py": {"ProcessGroup", "distributed_c10d", "get_rank", "get_process_group_ranks", "is_initialized"},
    "failure.py": {"DistError", "DistNetworkError", "DistStoreError"},
    "store_line.py": set(),  # the types of stores, nothing of them is called
}
"""What is asked of torch.distributed: to move bytes, who is in a group, and what its errors are called."""


def test_few_files_name_torch_distributed():
    folder = Path(collectives.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        named = [a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names]
        named += [n.module or "" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
        assert path.name in CALLED or not ("torch.distributed" in named or "distributed" in text.replace("torch.distributed group", "")), path.name
    for name, known in CALLED.items():
        called = {
            n.attr
            for n in ast.walk(ast.parse((folder / name).read_text()))
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "dist"
        }
        assert called == known, f"{name}: no backend may add"
    assert "group.alltoall_base" in (folder / "wire.py").read_text()
