"""What exact sums over tokens cost: the gradient of a weight added grain by grain in integers, against the same product in one piece added in fp32.

Baseline: ``linear.matmul`` over all rows with fp32 output (per expert where there are experts), then an fp32 add into the gradient. Shapes of
Qwen3-30B-A3B, bf16 operands, one thread. Both take turns within one run; a time is the thread's own processor time, a ratio the median over turns.

    python benchmarks/run.py gradients
"""

from __future__ import annotations

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
from tio_megatron.kernels.integer_sum import IntegerSum, add_products, reference, untouched_zeros  # noqa: E402
from tio_megatron.kernels.linear import matmul  # noqa: E402
from tio_megatron.testing import first_mismatch  # noqa: E402

TOKENS = 2048
DENSE = (("qkv", 5120, 2048), ("o_proj", 2048, 4096))
GRAINS = {64: 1.25, 128: 1.2, 256: 1.15, 512: 1.15, 1024: 1.15}
"""Rows of a grain of a dense weight, and the goal: at most this many times the baseline."""
EXPERTS = (("expert gate_up", 1536, 2048), ("expert down", 2048, 768))
COUNT, ROWS = 8, 128
"""Experts in a call and rows of each: what 2048 tokens give an expert of 128 with top-8."""
EXPERT_GRAINS = {4: 2.5, 8: 1.8, 32: 1.2, 64: 1.15}
TURNS = 7


def rows() -> list[dict[str, Any]]:
    """A dense weight by rows of a grain, experts by rows of a grain, then memory per element."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [row for shape in DENSE for row in _products(*shape, 1, TOKENS, GRAINS)]
        found += [row for shape in EXPERTS for row in _products(*shape, COUNT, ROWS, EXPERT_GRAINS)]
    finally:
        torch.set_num_threads(threads)
    return [*found, _memory()]


def _products(name: str, n: int, k: int, count: int, each: int, goals: dict[int, float]) -> list[dict[str, Any]]:
    """All grain sizes against one baseline, in the same turns."""
    generator = torch.Generator().manual_seed(n)
    total = count * each
    dy, x = (torch.randn(total, columns, generator=generator).bfloat16() for columns in (n, k))
    gradients = [torch.zeros(n, k) for _ in range(count)]
    spans = [slice(e * each, (e + 1) * each) for e in range(count)]
    sums = [IntegerSum.empty((n, k), -30) for _ in range(count)]

    def stock() -> None:
        for gradient, span in zip(gradients, spans, strict=True):
            gradient.add_(matmul(dy[span].t(), x[span].t()))

    def ours(grain: int) -> Callable[[], None]:
        starts, of = torch.arange(0, total + 1, grain), torch.arange(count + 1) * (each // grain)
        return lambda: add_products(sums, dy, x, starts=starts, of=of)

    right = {grain: _right(dy[:each], x[:each], grain) for grain in goals}
    calls = {0: stock, **{grain: ours(grain) for grain in goals}}
    times: dict[int, list[float]] = {grain: [] for grain in calls}
    for turn in range(TURNS + 1):
        for grain, call in calls.items():
            began = time.thread_time()
            call()
            if turn:  # the first warms up, and touches the memory
                times[grain].append(time.thread_time() - began)
    work = 2 * total * n * k
    where = f"{count} experts, {each} rows each" if count > 1 else f"{each} rows"
    found = []
    for grain, goal in goals.items():
        title = f"{name} [{n}, {k}], {where}, {grain} rows a grain, time / product + fp32 add"
        if not right[grain]:
            found.append({"name": title, "ratio": None, "goal": goal, "met": False, "note": "bytes differ"})
            continue
        ratio = median(a / b for a, b in zip(times[grain], times[0], strict=True))
        note = f"{min(times[grain]) * 1e3:.1f} ms, {work / min(times[grain]) / 1e9:.0f} Gflop/s; baseline {min(times[0]) * 1e3:.1f} ms"
        found.append({"name": title, "ratio": ratio, "goal": goal, "met": ratio <= goal, "note": note})
    return found


def _right(dy: torch.Tensor, x: torch.Tensor, grain: int) -> bool:
    """Whether some rows and columns of the sum have the definition's bytes, in each fast instruction set."""
    few_dy, few_x = dy[:, :13], x[:, :40]
    starts = torch.arange(0, len(dy) + 1, grain)
    want = IntegerSum.empty((13, 40), -30)
    for lo, hi in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        reference.add_partials(want, matmul(few_dy[lo:hi].t(), few_x[lo:hi].t()))
    for isa in [name for name in library.supported_isas() if name != "generic"] or ["generic"]:
        with library.using_isa(isa):
            got = IntegerSum.empty((13, 40), -30)
            add_products(got, few_dy, few_x, starts=starts)
        if first_mismatch((got.low, got.high, got.peak), (want.low, want.high, want.peak)):
            return False
    return True


def _memory() -> dict[str, Any]:
    """Bytes an element takes once partials have been added, by the pages that came to be resident; an fp32 gradient takes 4."""
    n, k = 4096, 4096
    dy, x = torch.randn(256, n).bfloat16() * 1e-4, torch.randn(256, k).bfloat16()  # partials below `large`, as gradients of a mean loss are
    total = IntegerSum(untouched_zeros((n, k)), untouched_zeros((n, k)), torch.zeros(1))
    before = _resident()
    add_products(total, dy, x, starts=torch.tensor([0, 256]))
    each = (_resident() - before) / (n * k)
    name = "resident bytes per element of a sum / those of an fp32 gradient"
    return {"name": name, "ratio": each / 4, "goal": 2.1, "met": each <= 8.4, "note": f"{each:.2f} bytes"}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    for row in rows():
        shown = "bytes differ" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"{row['name']:95s} {shown}  goal {row['goal']:<5} {'met' if row['met'] else 'MISSED':7s}{row.get('note', '')}", flush=True)
