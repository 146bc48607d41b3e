"""Attention against torch's SDPA in fp32: prefill of one sequence, and decode over pages, at Qwen3-30B-A3B's heads (32/4 of 128).

Ours reads bf16, SDPA fp32 (it is faster in fp32 than in bf16 on processors without bf16 instructions). One thread; both take turns and the ratio is the
median over the turns. SDPA's keys are contiguous and already in its layout; ours lie in pages in random order.

    python benchmarks/run.py attention
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tio_megatron.kernels import library  # noqa: E402
from tio_megatron.kernels.attention import attention, attention_paged, reference, write_pages  # noqa: E402
from tio_megatron.testing import first_mismatch  # noqa: E402

HEADS, GROUPS, SIZE, PAGE = 32, 4, 128, 128
SCALE = SIZE**-0.5
PREFILL, DECODE = 1.1, 1.2
"""Goals: at most this many times SDPA's time."""


def rows() -> list[dict[str, Any]]:
    """One row per shape; no ratio where a byte is wrong."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            return [_prefill(tokens) for tokens in (512, 1024, 2048)] + [_decode(batch, keys) for batch, keys in ((1, 1024), (1, 4096), (8, 1024))]
    finally:
        torch.set_num_threads(before)


def _prefill(tokens: int) -> dict[str, Any]:
    q, k, v = (torch.randn(tokens, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    qb, kb, vb = (x.bfloat16() for x in (q, k, v))
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    qs, ks, vs = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v))

    def ours() -> torch.Tensor:
        return attention(qb, kb, vb, cu_q=cu, cu_k=cu, scale=SCALE)[0]

    right = _same_in_every_instruction_set(ours) and first_mismatch(ours()[-4:], _reference_rows(qb[-4:], kb, vb)) is None
    work = 4 * SIZE * HEADS * tokens * (tokens + 1) / 2
    return _row(
        f"attention forward, {tokens} tokens",
        right,
        ours,
        lambda: sdpa(qs, ks, vs, is_causal=True, enable_gqa=True),
        PREFILL,
        lambda s: f"{work / s / 1e9:.0f} GFLOP/s",
    )


def _decode(batch: int, keys: int) -> dict[str, Any]:
    q, k, v = torch.randn(batch, HEADS, SIZE), torch.randn(batch, keys, GROUPS, SIZE), torch.randn(batch, keys, GROUPS, SIZE)
    qb, kb, vb = (x.bfloat16() for x in (q, k, v))
    each = keys // PAGE
    table = torch.randperm(batch * each).int().view(batch, each)
    cache = torch.full((batch * each, GROUPS, PAGE, 2 * SIZE), float("nan"), dtype=torch.bfloat16)
    for i in range(batch):
        slots = table[i].long().repeat_interleave(PAGE) * PAGE + torch.arange(keys) % PAGE
        write_pages(kb[i], vb[i], cache, slots)
    lengths, starts = torch.full((batch,), keys, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    qs, ks, vs = q.unsqueeze(2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def ours() -> torch.Tensor:
        return attention_paged(qb, cache, table, lengths, starts, scale=SCALE)

    right = _same_in_every_instruction_set(ours) and first_mismatch(ours()[-1:], _reference_rows(qb[-1:], kb[-1], vb[-1])) is None
    read = 2 * batch * keys * GROUPS * SIZE * 2
    return _row(
        f"paged decode, batch {batch}, {keys} keys", right, ours, lambda: sdpa(qs, ks, vs, enable_gqa=True), DECODE, lambda s: f"{read / s / 1e9:.1f} GB/s"
    )


def _reference_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cu_q, cu_k = (torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k))
    return reference.attention(q, k, v, cu_q=cu_q, cu_k=cu_k, scale=SCALE)[0]


def _same_in_every_instruction_set(ours: Callable[[], torch.Tensor]) -> bool:
    results = []
    for isa in library.supported_isas():
        if isa == "generic" and len(library.supported_isas()) > 1:
            continue  # scalar code: minutes at these sizes, and the tests compare it at small ones
        with library.using_isa(isa):
            results.append(ours())
    return all(first_mismatch(result, results[0]) is None for result in results)


def _row(name: str, right: bool, ours: Callable[[], Any], stock: Callable[[], Any], goal: float, speed: Callable[[float], str]) -> dict[str, Any]:
    if not right:
        return {"name": name, "ratio": None, "goal": goal, "met": False, "note": "bytes differ"}
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(9):
        for call, kept in ((ours, times[0]), (stock, times[1])):
            start = time.thread_time()  # this thread's own: what else the machine does counts less
            call()
            if turn:
                kept.append(time.thread_time() - start)
    ratio = median(a / b for a, b in zip(*times, strict=True))
    note = f"{median(times[0]) * 1e3:.2f} ms, SDPA {median(times[1]) * 1e3:.2f} ms; {speed(median(times[0]))}"
    return {"name": name, "ratio": ratio, "goal": goal, "met": ratio <= goal, "note": note}


if __name__ == "__main__":
    for row in rows():
        print(row)
