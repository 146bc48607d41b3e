"""The product and the grouped product against MKL's fp32 and torch's bf16, at the shapes of Qwen3-30B-A3B, on one thread.

Stock and ours take turns within one run. A time is the thread's own processor time, the best of a turn's calls; a ratio is that of one
turn, the median over turns: so what else the machine does cancels. Weights rotate through more memory than the caches hold. The
core's fma peak and read bandwidth are measured in the same turns, best against best.

    python benchmarks/run.py products
    python benchmarks/products.py
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tio_megatron.kernels import library  # noqa: E402
from tio_megatron.kernels.grouped import PackedExperts, grouped_linear  # noqa: E402
from tio_megatron.kernels.linear import PackedWeight, linear, reference  # noqa: E402
from tio_megatron.testing import first_mismatch  # noqa: E402

# name, N, K, leaves; the head is an eighth of 151936 rows, as one of 8 vocabulary shards holds
SHAPES = (
    ("qkv", 5120, 2048, 1),
    ("o_proj", 2048, 4096, 8),
    ("expert gate_up", 1536, 2048, 1),
    ("expert down", 2048, 768, 8),
    ("router", 128, 2048, 1),
    ("lm_head, an eighth", 18992, 2048, 1),
)
ROWS = {1: 0.85, 8: 0.85, 64: 0.85, 512: 1.1}
"""Rows and the goal: at most this many times MKL's fp32 time."""
PEAK, BANDWIDTH, GROUPED = 0.65, 0.8, 0.5
"""Goals: share of the core's fma peak at 512 rows, share of its read bandwidth at 1 row, time in units of a loop of torch bf16 products."""
EXPERTS, TOKENS = 64, (8, 64, 512)
"""Experts on one rank (EP 2 of 128), each choosing 8 of 128 experts: so half of 8 rows per token come here."""
WORKING_SET = 256 << 20
"""Bytes of packed weights to rotate through, and to read for the bandwidth: several times any cache that one core can fill."""
TURNS = 9

_fma = library.bind("tio_limit_fma", library.size, library.pointer)
_read = library.bind("tio_limit_read", library.pointer, library.size)


def rows() -> list[dict[str, Any]]:
    """One row per shape and number of rows, then shares of the machine's limits, then the grouped product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = [row for shape in SHAPES for row in _shape(*shape)]
    finally:
        torch.set_num_threads(threads)
    found = [row for row in products if "share" not in row["name"]] + [row for row in products if "share" in row["name"]]
    found += _grouped_in_a_process({})
    if _has_bf16_instructions():
        # what the loop costs on the many processors that lack them
        found += _grouped_in_a_process({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"})
    return found


def _has_bf16_instructions() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ


def _shape(name: str, n: int, k: int, leaves: int) -> list[dict[str, Any]]:
    copies = max(2, min(48, WORKING_SET // (n * k * 2)))
    generator = torch.Generator().manual_seed(n)
    first = torch.randn(n, k, generator=generator).bfloat16() * 0.02
    packed = [PackedWeight.from_weight(first.roll(i, 0)) for i in range(copies)]
    stock = [first.roll(i, 0).float() for i in range(copies)]
    found = []
    for m, goal in ROWS.items():
        x = torch.randn(m, k, generator=generator)
        xb = x.bfloat16()
        right = _right(xb, packed[0], first, leaves)
        name_here = f"{name} [{n}, {k}] bf16, M = {m}"
        if not right:
            found.append({"name": name_here, "ratio": None, "goal": goal, "met": False})
            continue
        each = max(1, min(8, int(4e-3 / (m * n * k / 50e9))))
        calls: dict[str, Callable[[int], Any]] = {
            "ours": lambda i, xb=xb: linear(xb, packed[i % copies], leaves=leaves),
            "stock": lambda i, x=x: torch.nn.functional.linear(x, stock[i % copies]),
        }
        times, limits = _take_turns(calls, each)
        ratio, ours = median(a / b for a, b in zip(times["ours"], times["stock"], strict=True)), min(times["ours"])
        peak, bandwidth = 2 * m * n * k / ours / limits["fma"], n * k * 2 / ours / limits["read"]
        of_peak, of_bandwidth = f"{peak:.2f} of {limits['fma'] / 1e9:.0f} Gflop/s", f"{bandwidth:.2f} of {limits['read'] / 1e9:.0f} GB/s"
        note = f"{ours * 1e6:.0f} us; {of_peak if m > 8 else of_bandwidth}"
        found.append({"name": f"{name_here}, time / MKL fp32", "ratio": ratio, "goal": goal, "met": ratio <= goal, "note": note})
        limit, share, least = ("fma peak", peak, PEAK) if m == 512 else ("read bandwidth", bandwidth, BANDWIDTH)
        if m in (1, 512) and name != "router":  # its weight is smaller than a cache, so no memory is read
            found.append({"name": f"{name_here}, share of {limit}", "ratio": share, "goal": least, "met": share >= least, "note": "higher is better"})
    return found


def _right(x: torch.Tensor, packed: PackedWeight, w: torch.Tensor, leaves: int) -> bool:
    """Whether a sample of the output has the definition's bytes, and every row those it has alone."""
    y = linear(x, packed, leaves=leaves, out_dtype=torch.float32)
    some_rows, some_columns = torch.linspace(0, x.shape[0] - 1, 3).long(), torch.linspace(0, w.shape[0] - 1, 5).long()
    want = reference.matmul(x[some_rows], w[some_columns], leaves)
    alone = linear(x[-1:], packed, leaves=leaves, out_dtype=torch.float32)
    return first_mismatch(y[some_rows][:, some_columns], want) is None and first_mismatch(y[-1:], alone) is None


def _take_turns(calls: dict[str, Callable[[int], Any]], each: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per call, turn by turn, and the best of the machine's limits seen between them (operations and bytes per second)."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    limits = {"fma": 0.0, "read": 0.0}
    memory, operations = torch.ones(WORKING_SET, dtype=torch.uint8), ctypes.c_double()
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            best = float("inf")
            for i in range(each):
                began = time.thread_time()
                call(turn * each + i)
                best = min(best, time.thread_time() - began)
            if turn:  # the first warms up
                times[name].append(best)
        began = time.thread_time()
        _fma(100_000, ctypes.addressof(operations))
        limits["fma"] = max(limits["fma"], operations.value / (time.thread_time() - began))
        began = time.thread_time()
        _read(memory.data_ptr(), memory.numel())
        limits["read"] = max(limits["read"], memory.numel() / (time.thread_time() - began))
    return times, limits


def _grouped_in_a_process(env: dict[str, str]) -> list[dict[str, Any]]:
    """oneDNN reads its switches when it is first used, so the grouped rows have a process of their own."""
    done = subprocess.run([sys.executable, __file__, "grouped"], env={**os.environ, **env}, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    for row in found if env else ():
        row["name"] += ", torch without bf16 instructions"
    return found


def _grouped() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found = []
    for name, n, k, leaves in (SHAPES[2], SHAPES[3]):
        generator = torch.Generator().manual_seed(n)
        w = torch.randn(EXPERTS, n, k, generator=generator).bfloat16() * 0.02
        packed = PackedExperts.from_weights(w)
        for tokens in TOKENS:
            expert_of = torch.randint(0, EXPERTS, (tokens * 4,), generator=generator).sort().values
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(expert_of, minlength=EXPERTS).cumsum(0)])
            x, bounds = torch.randn(tokens * 4, k, generator=generator).bfloat16(), offsets.tolist()
            filled = [e for e in range(EXPERTS) if bounds[e] < bounds[e + 1]]
            y = grouped_linear(x, packed, offsets, leaves=leaves)
            alone = torch.cat([linear(x[bounds[e] : bounds[e + 1]], w[e], leaves=leaves) for e in filled])
            row, expert = x[-1:], w[filled[-1]]
            right = first_mismatch(y, alone) is None and first_mismatch(y[-1:, :8], reference.matmul(row, expert[:8], leaves, torch.bfloat16)) is None
            calls: dict[str, Callable[[int], Any]] = {
                "ours": lambda i, x=x, offsets=offsets, leaves=leaves, packed=packed: grouped_linear(x, packed, offsets, leaves=leaves),
                "stock": lambda i, x=x, bounds=bounds, filled=filled, w=w: [torch.nn.functional.linear(x[bounds[e] : bounds[e + 1]], w[e]) for e in filled],
            }
            times, limits = _take_turns(calls, 1) if right else ({}, {})
            ratio = median(a / b for a, b in zip(times["ours"], times["stock"], strict=True)) if right else None
            note = "bytes differ"
            if right:
                ours, bytes_read = min(times["ours"]), len(filled) * n * k * 2
                of_peak, of_bandwidth = 2 * len(x) * n * k / ours / limits["fma"], bytes_read / ours / limits["read"]
                note = f"{ours * 1e3:.1f} ms; {of_peak:.2f} of fma peak, {of_bandwidth:.2f} of read bandwidth"
                if ratio > GROUPED and _has_bf16_instructions():
                    note += "; torch uses bf16 instructions, each worth two fma: no fp32 order can follow them"
            title = f"grouped {name}, {EXPERTS} experts, {len(x)} rows, time / loop of torch bf16"
            found.append({"name": title, "ratio": ratio, "goal": GROUPED, "met": ratio is not None and ratio <= GROUPED, "note": note})
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["grouped"]:
        print(json.dumps(_grouped()))
    else:
        for found_row in rows():
            shown = "bytes differ" if found_row["ratio"] is None else f"{found_row['ratio']:.2f}"
            print(f"{found_row['name']:75s} {shown}  goal {found_row['goal']:<5} {'met' if found_row['met'] else 'MISSED':7s}{found_row.get('note', '')}")
