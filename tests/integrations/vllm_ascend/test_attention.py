"""Our attention in vllm-ascend's frame, on a CPU: its base classes stand in, the pages are allocated its way, and the CPU family's kernels run.

What is shown: pages joined out of two allocations, lengths and slots handed over, chunks and decode with the bytes of one dense call. What an NPU's
kernels do is not shown here.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
import vllm_ascend_stand_in

from tio_megatron.integrations.vllm.ascend.pages import joined, one_cache
from tio_megatron.kernels.attention import attention
from tio_megatron.kernels.attention.npu import pools
from tio_megatron.testing import assert_same_bytes

PAGES, PAGE, GROUPS, HEADS, SIZE = 6, 128, 2, 4, 32


@pytest.fixture
def ours(monkeypatch):
    """The module under test, over stand-ins of the four classes of vllm-ascend that it names."""
    for name, module in vllm_ascend_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("tio_megatron.integrations.vllm.ascend.attention")
    del sys.modules["tio_megatron.integrations.vllm.ascend.attention"]


def allocated(shared=False):
    """Keys and values of one layer, allocated apart as raw bytes, then joined and looked at as vllm-ascend does."""
    size = PAGES * PAGE * GROUPS * SIZE * 2

    def allocate(config):
        parts = torch.full((size,), 7, dtype=torch.int8), torch.full((size,), 7, dtype=torch.int8)
        return {"layers.0.attn": parts} | ({"layers.1.attn": parts} if shared else {})

    found = joined(allocate)(None)
    return {name: tuple(raw.view(torch.bfloat16).view(PAGES, PAGE, GROUPS, SIZE) for raw in parts) for name, parts in found.items()}


def test_two_allocations_become_one_cache():
    keys, values = allocated()["layers.0.attn"]
    cache = one_cache(keys, values)
    assert cache.shape == (PAGES, GROUPS, PAGE, 2 * SIZE) and cache.is_contiguous()
    first, second = pools(cache)
    assert first.data_ptr() == keys.data_ptr() and second.data_ptr() == values.data_ptr() and first.shape == keys.shape


def test_layers_that_share_a_cache_share_it_joined():
    found = allocated(shared=True)
    assert found["layers.0.attn"][0].data_ptr() == found["layers.1.attn"][0].data_ptr()


def test_allocations_apart_are_refused():
    apart = [torch.zeros(PAGES, PAGE, GROUPS, SIZE, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(ValueError, match="side by side"):
        one_cache(apart[0], apart[2])
    with pytest.raises(ValueError, match="keys and values of one size"):
        joined(lambda config: {"a": (torch.zeros(2), torch.zeros(3))})(None)


def test_chunks_and_decode_have_the_bytes_of_one_dense_call(ours):
    from tio_megatron.contract import Contract
    from tio_megatron.integrations.vllm.building import Build, building

    generator = torch.Generator().manual_seed(0)
    lengths = (300, 130)
    tokens = [[torch.randn(length, heads, SIZE, generator=generator).bfloat16() for heads in (HEADS, GROUPS, GROUPS)] for length in lengths]
    starts = torch.tensor([0, 300, 430], dtype=torch.int32)
    q, k, v = (torch.cat([sequence[i] for sequence in tokens]) for i in range(3))
    dense, _ = attention(q, k, v, cu_q=starts, cu_k=starts, scale=SIZE**-0.5)

    with building(Build(Contract())):
        layer = ours.TioAscendAttentionImpl(HEADS, SIZE, SIZE**-0.5, GROUPS, None, None, "auto", None, ours.AttentionType.DECODER, None)
    context = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": SimpleNamespace(impl=layer)}))
    builder = ours.TioAscendAttentionMetadataBuilder(SimpleNamespace(block_size=PAGE), ["a"], context, torch.device("cpu"))
    cache = allocated()["layers.0.attn"]
    table = torch.tensor([[4, 1, 0], [2, 5, 0]], dtype=torch.int32)
    table[0, 2] = 3
    found = [torch.empty(length, HEADS, SIZE, dtype=torch.bfloat16) for length in lengths]
    done = [0, 0]
    for counts in ((200, 1), (99, 128), (1, 1)):
        new = [[part[done[i] : done[i] + count] for part in tokens[i]] for i, count in enumerate(counts)]
        places = [table[i, (done[i] + t) // PAGE] * PAGE + (done[i] + t) % PAGE for i, count in enumerate(counts) for t in range(count)]
        done = [a + b for a, b in zip(done, counts, strict=True)]
        total = sum(counts)
        batch = SimpleNamespace(
            causal=True,
            num_reqs=2,
            num_actual_tokens=total,
            query_start_loc_cpu=torch.tensor([0, counts[0], total], dtype=torch.int32),
            seq_lens_cpu=torch.tensor(done, dtype=torch.int32),
            slot_mapping=torch.tensor([int(place) for place in places], dtype=torch.int32),
            block_table_tensor=table,
        )
        step = builder.build(0, batch)
        # A row of padding behind the step's tokens, as engines have.
        rows = [torch.cat([new[0][part], new[1][part], torch.full_like(new[0][part][:1], float("nan"))]) for part in range(3)]
        out = torch.empty(total + 1, HEADS, SIZE, dtype=torch.bfloat16)
        layer.forward(None, *rows, cache, step, out)
        for i, rows_out in enumerate(out[:total].split(list(counts))):
            found[i][done[i] - counts[i] : done[i]] = rows_out
    assert_same_bytes(torch.cat(found), dense, "chunks and decode over pages")
    # The control: the first page of the first sequence holds something else.
    layer.cache[4] += 1
    again = torch.empty_like(out)
    layer.forward(None, *rows, cache, step, again)
    assert not torch.equal(again[:1], out[:1]) and torch.equal(again[1:2], out[1:2])


def test_what_is_not_covered_is_refused(ours):
    with pytest.raises(ValueError, match="sliding window 5"):
        ours.TioAscendAttentionImpl(HEADS, SIZE, 1.0, GROUPS, None, 5, "auto", None, ours.AttentionType.DECODER, None)
    with pytest.raises(ValueError, match="only causal"):
        builder = ours.TioAscendAttentionMetadataBuilder.__new__(ours.TioAscendAttentionMetadataBuilder)
        builder.build(0, SimpleNamespace(causal=False))
