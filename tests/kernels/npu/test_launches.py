"""What one attention layer costs in calls of the device, in eager mode: counted, and beside what a step costs that prepares everything anew.

Views cost nothing on a device and are not counted. The operators between (rotary positions, products) are the same on both sides and left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tio_megatron.kernels.attention import npu as attention
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import masks
from tio_megatron.kernels.npu.calls import find
from tio_megatron.testing import assert_same_bytes

HEADS, GROUPS, SIZE, PAGE = 4, 2, 128, 128
SCALE = SIZE**-0.5
LAYERS = 3
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::_to_copy"}
"""Operators that wait for the device, or may."""


class Calls(TorchDispatchMode):
    """Calls of the device by name: what is neither a view nor a question about a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.returns)
        if not views and func._schema.name not in ("aten::detach", "aten::is_same_size", "aten::empty", "aten::new_empty", "aten::empty_like"):
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Batch:
    """Sequences that each decode one token, a layer's fused query, key and value rows, and pages filled so far."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        n, pages = len(lengths), [-(-length // PAGE) for length in lengths]
        self.qkv = torch.randn(n, (HEADS + 2 * GROUPS) * SIZE).bfloat16()
        self.w = torch.randn(SIZE).bfloat16(), torch.randn(SIZE).bfloat16()
        self.cache = torch.randn(sum(pages), GROUPS, PAGE, 2 * SIZE).bfloat16()
        self.table = torch.zeros(n, max(pages), dtype=torch.int32)
        start = 0
        for i, count in enumerate(pages):
            self.table[i, :count] = torch.arange(start, start + count)
            start += count
        last = [length - 1 for length in lengths]
        self.slots = torch.tensor([int(self.table[i, p // PAGE]) * PAGE + p % PAGE for i, p in enumerate(last)])
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.arange(n + 1, dtype=torch.int32)
        self.out = torch.empty(n, HEADS, SIZE, dtype=torch.bfloat16)

    def parts(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.unflatten(1, (-1, SIZE)) for t in self.qkv.split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], 1))


def ours(batch: Batch) -> torch.Tensor:
    """One layer: norms of the heads, one write of keys and values, one attention over all sequences."""
    q, k, v = batch.parts()
    q, k = norm.rms_norm(q, batch.w[0], 1e-6), norm.rms_norm(k, batch.w[1], 1e-6)
    attention.write_pages(k, v, batch.cache, batch.slots)
    attention.attention_paged(q, batch.cache, batch.table, batch.seq_lens, batch.starts, SCALE, batch.out)
    return batch.out


def naive(batch: Batch) -> torch.Tensor:
    """One layer that makes its mask and lengths itself, asks the device for them, writes pages token by token and attends sequence by sequence."""
    q, k, v = batch.parts()
    q, k = (find("npu_rms_norm")(t.contiguous(), w, 1e-6)[0] for t, w in ((q, batch.w[0]), (k, batch.w[1])))
    keys, values = attention.pools(batch.cache)
    for i in range(len(batch.lengths)):
        slot = int(batch.slots[i].item())
        for pool, rows in ((keys, k), (values, v)):
            pool.view(-1, GROUPS, SIZE)[slot].copy_(rows[i])
    mask = torch.triu(torch.ones(masks.EDGE, masks.EDGE, dtype=torch.bool), 1)
    out = []
    for i in range(len(batch.lengths)):
        length = int(batch.seq_lens[i].item())
        taken = [torch.cat([pool[p] for p in batch.table[i, : -(-length // PAGE)].tolist()])[:length].contiguous() for pool in (keys, values)]
        given = {"actual_seq_qlen": [1], "actual_seq_kvlen": [length], "num_query_heads": HEADS, "num_key_value_heads": GROUPS, "softmax_scale": SCALE}
        out.append(
            find("npu_fused_infer_attention_score_v2")(q[i : i + 1].contiguous(), *taken, atten_mask=mask, input_layout="TND", sparse_mode=3, **given)[0]
        )
    return torch.cat(out)


def counted(step: Any, batch: Batch) -> Counter[str]:
    with Calls() as calls:
        for _ in range(LAYERS):
            step(batch)
    return calls.seen


def test_a_layer_is_eight_calls_whatever_the_batch() -> None:
    for lengths in ([5, 6], [130, 7, 256, 300, 1, 2, 3, 128]):
        batch = Batch(lengths)
        ours(batch)  # the mask is made once for a device
        seen = counted(ours, batch)
        assert seen == {
            "npu::npu_rms_norm": 2 * LAYERS,
            "aten::clone": 3 * LAYERS,  # queries, keys and values, out of the fused rows
            "npu::npu_scatter_pa_kv_cache": LAYERS,
            "npu::npu_fused_infer_attention_score_v2": LAYERS,
            "aten::copy_": LAYERS,
        }, seen


def test_no_call_waits_for_the_device_or_changes_a_format() -> None:
    batch = Batch([130, 7, 256])
    ours(batch)
    seen = counted(ours, batch)
    assert not WAITS & set(seen) and not any("format_cast" in name for name in seen)


def test_a_step_that_prepares_everything_anew_gives_the_same_bytes_for_many_more_calls() -> None:
    batch = Batch([130, 7, 256, 300, 1, 2, 3, 128])
    assert_same_bytes(naive(batch), ours(batch), "naive step")
    few, many = counted(ours, batch), counted(naive, batch)
    assert WAITS & set(many)
    assert sum(many.values()) > 4 * sum(few.values()), (few, many)


def test_the_naive_step_grows_with_the_batch_and_ours_does_not() -> None:
    small, large = Batch([40, 60]), Batch([40, 60] * 4)
    assert sum(counted(ours, small).values()) == sum(counted(ours, large).values())
    assert sum(counted(naive, large).values()) > 2 * sum(counted(naive, small).values())


def test_training_is_one_call_of_attention_and_one_of_its_gradient() -> None:
    starts = torch.tensor([0, 9, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, n, SIZE).bfloat16() for n in (HEADS, GROUPS, GROUPS))
    o, lse = attention.attention(q, k, v, starts, starts, SCALE)
    with Calls() as calls:
        attention.attention(q, k, v, starts, starts, SCALE)
        attention.attention_backward(o, q, k, v, o, lse, starts, starts, SCALE)
    assert calls.seen == {
        "npu::npu_fusion_attention": 1,
        "aten::log": 1,
        "aten::add": 1,
        "npu::npu_fusion_attention_grad": 1,
        "aten::clone": 1,  # the statistics, eight times beside each other as the gradient reads them
        "aten::ones_like": 1,
    }, calls.seen
