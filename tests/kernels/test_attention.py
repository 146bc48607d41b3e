"""Attention: the reference's bytes, and one result for dense, packed, chunked, paged and decoded sequences."""

from __future__ import annotations

import math

import pytest
import torch

from tio_megatron.kernels.attention import attention, attention_paged, reference, write_pages
from tio_megatron.kernels.exact import chain_dot, fma
from tio_megatron.kernels.math import reference as m
from tio_megatron.testing import assert_same_bytes, first_mismatch

SHAPES = [(8, 1, 64), (4, 4, 128), (6, 2, 48), (8, 2, 64), (3, 1, 256)]
"""Query heads, key/value heads, head size: GQA 8:1, 1:1, 3:1, 4:1, and the largest head."""


def _qkv(tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, groups, size).to(dtype), torch.randn(tokens, groups, size).to(dtype)


def _cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, cu_q=_cu(q.shape[0]), cu_k=_cu(k.shape[0]), scale=q.shape[2] ** -0.5)[0]


@pytest.mark.parametrize("heads, groups, size", SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, heads: int, groups: int, size: int, tokens: int) -> None:
    q, k, v = _qkv(tokens, heads, groups, size, dtype)
    cu = _cu(tokens)
    assert_same_bytes(attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.1), reference.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.1))


@pytest.mark.parametrize("heads, groups, size", SHAPES[:2])
def test_bytes_are_the_references_over_several_blocks(isa: str, heads: int, groups: int, size: int) -> None:
    q, k, v = _qkv(211, heads, groups, size, torch.bfloat16)
    for rows in (211, 40, 9, 1):
        cu_q, cu_k = _cu(rows), _cu(211)
        assert_same_bytes(
            attention(q[-rows:], k, v, cu_q=cu_q, cu_k=cu_k, scale=0.1), _long_reference(heads, groups, size, q, k, v, rows), what=f"last {rows} rows"
        )


_CACHE: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}


def _long_reference(heads: int, groups: int, size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = (heads, groups, size)
    if key not in _CACHE:
        _CACHE[key] = reference.attention(q, k, v, cu_q=_cu(211), cu_k=_cu(211), scale=0.1)
    o, lse = _CACHE[key]
    return o[-rows:], lse[-rows:]


@pytest.mark.parametrize("heads, groups, size", SHAPES[:4])
@pytest.mark.parametrize("page", [64, 128, 256])
def test_prefill_chunks_decode_and_pages_are_one_result(isa: str, dtype: torch.dtype, heads: int, groups: int, size: int, page: int) -> None:
    """Pages hold NaN where nothing was written, are out of order, and other sequences' pages lie between them."""
    lengths = [231, 1, 64, 129]
    parts = [_qkv(n, heads, groups, size, dtype) for n in lengths]
    whole = [_alone(*part) for part in parts]
    cache = torch.full((24, groups, page, 2 * size), float("nan"), dtype=dtype)
    free = torch.randperm(24).tolist()
    tables = torch.zeros(4, 5, dtype=torch.int32)
    for i, (n, (_, k, v)) in enumerate(zip(lengths, parts, strict=True)):
        used = -(-n // page)
        tables[i, :used] = torch.tensor([free.pop() for _ in range(used)])
        slots = tables[i].repeat_interleave(page)[:n].long() * page + torch.arange(n) % page
        write_pages(k, v, cache, slots)

    def rows_from(starts: list[int], stops: list[int]) -> torch.Tensor:
        q = torch.cat([part[0][a:b] for part, a, b in zip(parts, starts, stops, strict=True)])
        lens = [b - a for a, b in zip(starts, stops, strict=True)]
        return attention_paged(q, cache, tables, torch.tensor(stops, dtype=torch.int32), _cu(*lens), scale=size**-0.5)

    assert_same_bytes(rows_from([0] * 4, lengths), torch.cat(whole), what="whole prefill")
    assert_same_bytes(rows_from([n - 1 for n in lengths], lengths), torch.stack([w[-1] for w in whole]), what="decode")
    assert_same_bytes(
        rows_from([0, 0, 3, 90], [77, 0, 60, 129]), torch.cat([whole[0][:77], whole[2][3:60], whole[3][90:]]), what="mixed batch, one chunk empty"
    )
    assert_same_bytes(rows_from([77, 0, 60, 0], [200, 1, 64, 64]), torch.cat([whole[0][77:200], whole[1], whole[2][60:], whole[3][:64]]), what="second chunks")


def test_pack_and_padding_change_nothing(isa: str, dtype: torch.dtype) -> None:
    """Pains 9 and 10: a sequence alone, packed at any place, and with other tokens behind it."""
    parts = [_qkv(n, 4, 2, 64, dtype) for n in (3, 130, 65, 1)]
    alone = [_alone(*part) for part in parts]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        q, k, v = (torch.cat([parts[i][j] for i in order]) for j in range(3))
        cu = _cu(*(parts[i][0].shape[0] for i in order))
        packed, _ = attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.125)
        assert_same_bytes(packed, torch.cat([alone[i] for i in order]))
    longer = [torch.cat([t, torch.full_like(t[:20], float("nan"))]) for t in parts[1]]
    assert_same_bytes(_alone(*longer)[:130], alone[1], what="padding behind")


def test_head_cuts_change_nothing(isa: str) -> None:
    q, k, v = _qkv(90, 16, 4, 64, torch.bfloat16)
    whole = _alone(q, k, v)
    for tp in (2, 4, 8, 16):
        n, g = 16 // tp, max(1, 4 // tp)
        parts = [_alone(q[:, r * n : (r + 1) * n], k[:, r * 4 // tp : r * 4 // tp + g], v[:, r * 4 // tp : r * 4 // tp + g]) for r in range(tp)]
        assert_same_bytes(torch.cat(parts, 1), whole, what=f"tp {tp}")


def test_planted_orders_differ() -> None:
    q, k, v = _qkv(160, 2, 2, 64)
    ours = _alone(q, k, v)
    cu = _cu(160)
    for kv_block in (32, 128):
        assert first_mismatch(ours, reference.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.125, kv_block=kv_block)[0]), f"blocks of {kv_block}"
    assert_same_bytes(ours, reference.attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.125)[0])
    last = q[-1:]
    row = attention(last, k, v, cu_q=_cu(1), cu_k=cu, scale=0.125)[0]
    backwards = attention(last, k.flip(0), v.flip(0), cu_q=_cu(1), cu_k=cu, scale=0.125)[0]
    assert first_mismatch(row, backwards), "keys in descending order"
    shifted = attention(last, k[1:], v[1:], cu_q=_cu(1), cu_k=_cu(159), scale=0.125)[0]
    assert first_mismatch(row, shifted)
    # the grid of blocks counted from another origin (a chunk's or a pack's): the same 160 keys, cut at 50 + 64 n
    s = chain_dot(last[0, :1].unsqueeze(1), k[:, 0]).squeeze(0) * 0.125
    assert first_mismatch(row[0, 0], _walk(s, v[:, 0], [50, 114, 160])) and first_mismatch(_walk(s, v[:, 0], [64, 128, 160]), row[0, 0]) is None


def _walk(s: torch.Tensor, v: torch.Tensor, stops: list[int]) -> torch.Tensor:
    """One row over any grid of blocks."""
    top, total, acc, start = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(v.shape[1]), 0
    for stop in stops:
        new = torch.maximum(top, s[start:stop].max())
        p, fade, block = m.exp(s[start:stop] - new), m.exp(top - new), torch.tensor(0.0)
        acc = acc * fade if start else acc
        for j in range(stop - start):
            block = block + p[j]
            acc = fma(p[j], v[start + j], acc)
        total = total * fade + block if start else block
        top, start = new, stop
    return acc / total


def test_nan_stays_behind_the_mask_and_in_its_row(isa: str, dtype: torch.dtype) -> None:
    q, k, v = _qkv(150, 4, 2, 64, dtype)
    clean = _alone(q, k, v)
    k[100], v[120, 1] = float("nan"), float("inf")
    q[30] = float("nan")
    dirty = _alone(q, k, v)
    keep = [i for i in range(100) if i != 30]
    assert_same_bytes(dirty[keep], clean[keep])
    assert dirty[30].isnan().all() and dirty[100:].isnan().all()
    assert_same_bytes(dirty, reference.attention(q, k, v, cu_q=_cu(150), cu_k=_cu(150), scale=0.125)[0])


def test_infinite_scores_and_minus_zero(isa: str) -> None:
    q, k, v = _qkv(70, 2, 1, 64)
    k[3] = 3e38
    q[:, 0] = q[:, 0].abs()
    v[0] = -0.0
    cu = _cu(70)
    got = attention(q, k, v, cu_q=cu, cu_k=cu, scale=1.0)
    assert_same_bytes(got, reference.attention(q, k, v, cu_q=cu, cu_k=cu, scale=1.0))
    assert got[0][0].signbit().logical_not().all(), "the sum starts at +0"


def test_threads_and_views_change_nothing(dtype: torch.dtype) -> None:
    qkv = torch.randn(100, 8, 64).to(dtype)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    whole = _alone(q.contiguous(), k.contiguous(), v.contiguous())
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same_bytes(_alone(q, k, v), whole)
    finally:
        torch.set_num_threads(before)
    cache = torch.full((4, 2, 64, 128), float("nan"), dtype=dtype)
    write_pages(k, v, cache, torch.arange(100) + 64)
    out = torch.full((103, 300), 7.0, dtype=dtype)
    table, lens = torch.tensor([[1, 2, 9, 9]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    padded = torch.cat([q, torch.full((3, 4, 64), float("nan"), dtype=dtype)])
    result = attention_paged(padded, cache, table, lens, _cu(100), scale=0.125, out=out[:, 30:286])
    assert_same_bytes(result[:100].reshape(100, 4, 64), whole)
    assert (out[100:] == 7).all() and (out[:, :30] == 7).all() and (out[:, 286:] == 7).all()
    assert_same_bytes(attention_paged(padded, cache, table, lens, _cu(100), scale=0.125)[100:], torch.zeros(3, 4, 64, dtype=dtype))


def test_pages(dtype: torch.dtype) -> None:
    k, v = torch.randn(200, 2, 32).to(dtype), torch.randn(200, 2, 32).to(dtype)
    slots = torch.randperm(512)[:200]
    slots[5], slots[80] = -1, -100
    cache, wanted = torch.zeros(4, 2, 128, 64, dtype=dtype), torch.zeros(4, 2, 128, 64, dtype=dtype)
    write_pages(k, v, cache, slots)
    reference.write_pages(k, v, wanted, slots)
    assert_same_bytes(cache, wanted)
    read_k, read_v = reference.read_pages(cache, torch.arange(4), 512)
    kept = slots >= 0
    assert_same_bytes(read_k[slots[kept]], k[kept])
    assert_same_bytes(read_v[slots[kept]], v[kept])
    write_pages(k, v, cache, torch.empty(0, dtype=torch.int64))
    assert_same_bytes(cache, wanted)


def test_empty() -> None:
    q, k, v = _qkv(0, 4, 2, 64)
    assert attention(q, k, v, cu_q=_cu(0), cu_k=_cu(0), scale=1.0)[0].shape == (0, 4, 64)
    assert attention(q, k, v, cu_q=_cu(), cu_k=_cu(), scale=1.0)[1].shape == (0, 4)
    cache = torch.zeros(1, 2, 64, 128)
    assert attention_paged(q, cache, torch.zeros(0, 1).int(), torch.zeros(0).int(), _cu(), scale=1.0).shape == (0, 4, 64)
    q, k, v = _qkv(5, 4, 2, 64)
    cu = _cu(0, 5, 0)
    assert_same_bytes(attention(q, k, v, cu_q=cu, cu_k=cu, scale=0.125)[0], _alone(q, k, v))


def test_refusals() -> None:
    q, k, v = _qkv(5, 4, 2, 64)
    with pytest.raises(ValueError, match="at least as many"):
        attention(q, k[:4], v[:4], cu_q=_cu(5), cu_k=_cu(4), scale=1.0)
    with pytest.raises(ValueError, match="ends at 4 of 5 tokens"):
        attention(q, k, v, cu_q=_cu(4), cu_k=_cu(5), scale=1.0)
    with pytest.raises(ValueError, match="head size 40"):
        attention(*_qkv(5, 4, 2, 40), cu_q=_cu(5), cu_k=_cu(5), scale=1.0)
    with pytest.raises(ValueError, match="not a multiple of 3"):
        attention(*_qkv(5, 4, 3, 64), cu_q=_cu(5), cu_k=_cu(5), scale=1.0)
    cache = torch.zeros(2, 2, 64, 128)
    with pytest.raises(ValueError, match="slots 0 .. 127"):
        write_pages(k, v, cache, torch.tensor([0, 1, 2, 3, 128]))
    with pytest.raises(ValueError, match="a multiple of 64"):
        write_pages(k, v, torch.zeros(2, 2, 32, 128), torch.arange(5))

    def paged(table: list[list[int]], length: int) -> None:
        attention_paged(q, cache, torch.tensor(table, dtype=torch.int32), torch.tensor([length], dtype=torch.int32), _cu(5), scale=1.0)

    with pytest.raises(ValueError, match="page outside 0 .. 1"):
        paged([[2]], 5)
    with pytest.raises(ValueError, match="at most 64"):
        paged([[0]], 65)
    with pytest.raises(ValueError, match="at least a sequence's query rows"):
        paged([[0]], 4)
