"""Triton attention: whole, packed, chunked, paged and decoded rows are one row; heads, neighbours and pages do not matter."""

import pytest
import torch

from tio_megatron.kernels.attention import reference
from tio_megatron.kernels.attention import triton as kernel
from tio_megatron.testing import assert_same_bytes

D, HEADS, GROUPS, SCALE = 32, 4, 2, 32**-0.5
LENGTHS = [5, 64, 130]
CU = torch.tensor([0, 5, 69, 199], dtype=torch.int32)
backward = kernel.KERNELS["attention_backward"]


def starts(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def tensors(tokens=199, d=D):
    return (torch.randn(tokens, heads, d).bfloat16() for heads in (HEADS, GROUPS, GROUPS))


def paged(k, v, page, pages=8):
    """A cache of NaN with k and v on pages in any order, and its table."""
    need = -(-len(k) // page)
    table = torch.randperm(pages)[:need].int().view(1, need)
    cache = torch.full((pages, GROUPS, page, 2 * k.shape[2]), float("nan")).bfloat16()
    slots = torch.tensor([int(table[0, j // page]) * page + j % page for j in range(len(k))], dtype=torch.int64)
    kernel.write_pages(k, v, cache, slots)
    return cache, table


def over_pages(q, cache, table, length):
    out = torch.empty_like(q)
    kernel.attention_paged(q, cache, table, torch.tensor([length], dtype=torch.int32), starts(len(q)), SCALE, out)
    return out


def test_packed_is_alone_and_chunked():
    q, k, v = tensors()
    o, lse = kernel.attention(q, k, v, CU, CU, SCALE)
    for i, n in enumerate(LENGTHS):
        rows = slice(int(CU[i]), int(CU[i + 1]))
        alone = kernel.attention(q[rows], k[rows], v[rows], starts(n), starts(n), SCALE)
        assert_same_bytes(alone[0], o[rows], f"sequence {i} alone")
        assert_same_bytes(alone[1], lse[rows], f"sequence {i} alone, lse")
        for done in (1, n // 2, n - 1):
            last = slice(rows.start + done, rows.stop)
            chunk = kernel.attention(q[last], k[rows], v[rows], starts(n - done), starts(n), SCALE)
            assert_same_bytes(chunk[0], o[last], f"sequence {i} from {done} on")


@pytest.mark.parametrize("page", [128, pytest.param(64, marks=pytest.mark.full)])
def test_pages_and_decoding(page):
    q, k, v = tensors(150)
    whole, _ = kernel.attention(q, k, v, starts(150), starts(150), SCALE)
    cache, table = paged(k, v, page)
    assert_same_bytes(over_pages(q, cache, table, 150), whole, "prefill over pages")
    for n in (1, 64, 65, 150):
        assert_same_bytes(over_pages(q[n - 1 : n], cache, table, n), whole[n - 1 : n], f"decoding token {n}")
    assert_same_bytes(over_pages(q[40:133], cache, table, 133), whole[40:133], "a chunk")


def test_a_batch_over_pages_is_each_alone():
    q, k, v = tensors(150)
    cache, table = paged(k, v, 64)
    lengths, queries = [150, 66, 7], [1, 3, 7]
    rows = [q[n - m : n] for n, m in zip(lengths, queries, strict=True)]
    out = torch.empty(11, HEADS, D).bfloat16()
    kernel.attention_paged(torch.cat(rows), cache, table.expand(3, 3).contiguous(), torch.tensor(lengths, dtype=torch.int32), starts(*queries), SCALE, out)
    for got, one, n in zip(out.split(queries), rows, lengths, strict=True):
        assert_same_bytes(got, over_pages(one, cache, table, n), f"sequence of {n}")


def test_heads_may_be_cut():
    q, k, v = tensors(70)
    cu, do = starts(70), torch.randn(70, HEADS, D).bfloat16()
    o, lse = kernel.attention(q, k, v, cu, cu, SCALE)
    whole = backward(do, q, k, v, o, lse, cu, cu, SCALE)
    for g in range(GROUPS):
        mine, own = slice(2 * g, 2 * g + 2), slice(g, g + 1)
        part = kernel.attention(q[:, mine], k[:, own], v[:, own], cu, cu, SCALE)
        assert_same_bytes(part[0], o[:, mine], f"heads of group {g}")
        grads = backward(do[:, mine], q[:, mine], k[:, own], v[:, own], part[0], part[1], cu, cu, SCALE)
        for name, got, want in zip(("dq", "dk", "dv"), grads, (whole[0][:, mine], whole[1][:, own], whole[2][:, own]), strict=True):
            assert_same_bytes(got, want, f"{name} of group {g}")
    one = kernel.attention(q[:, 1:2], k[:, :1], v[:, :1], cu, cu, SCALE)
    assert_same_bytes(one[0], o[:, 1:2], "one head of a group")


def test_gradients_do_not_see_the_pack():
    q, k, v = tensors()
    do = torch.randn(199, HEADS, D).bfloat16()
    o, lse = kernel.attention(q, k, v, CU, CU, SCALE)
    packed = backward(do, q, k, v, o, lse, CU, CU, SCALE)
    for i, n in enumerate(LENGTHS):
        rows = slice(int(CU[i]), int(CU[i + 1]))
        alone = backward(do[rows], q[rows], k[rows], v[rows], o[rows], lse[rows], starts(n), starts(n), SCALE)
        for name, got, want in zip(("dq", "dk", "dv"), alone, packed, strict=True):
            assert_same_bytes(got, want[rows], f"{name} of sequence {i}")


def test_what_is_not_visible_does_not_matter():
    q, k, v = tensors(130)
    clean, _ = kernel.attention(q, k, v, starts(130), starts(130), SCALE)
    later = slice(100, 130)
    changed = k.clone(), v.clone()
    changed[0][later], changed[1][later] = float("nan"), 7.0
    got, _ = kernel.attention(q, *changed, starts(130), starts(130), SCALE)
    assert_same_bytes(got[:100], clean[:100], "keys behind the mask")
    changed[1][128:] = float("nan")
    got, _ = kernel.attention(q, *changed, starts(130), starts(130), SCALE)
    assert_same_bytes(got[:100], clean[:100], "values of later blocks")


def test_the_order_shows():
    """Negative control: the same keys met in blocks that start elsewhere give other bytes."""
    q, k, v = tensors(150)
    whole, _ = kernel.attention(q[-1:], k, v, starts(1), starts(150), SCALE)
    moved = torch.cat([k[30:], k[:30]]), torch.cat([v[30:], v[:30]])
    other, _ = kernel.attention(q[-1:], *moved, starts(1), starts(150), SCALE)
    assert (whole.float() - other.float()).abs().max() < 0.02
    with pytest.raises(AssertionError):
        assert_same_bytes(other, whole, "another walk")


@pytest.mark.parametrize("d", [48, pytest.param(32, marks=pytest.mark.full)])
def test_error_beside_the_reference(d):
    """bf16 results within two units of the reference's values in fp32, gradients within 2% of their largest."""
    q, k, v = tensors(140, d)
    cu, do, scale = starts(10, 130), torch.randn(140, HEADS, d).bfloat16(), d**-0.5
    o, lse = kernel.attention(q, k, v, cu, cu, scale)
    exact, exact_lse = reference.attention(q.float(), k.float(), v.float(), cu_q=cu, cu_k=cu, scale=scale)
    assert (o.float() - exact).abs().max() < 2**-7 * exact.abs().max() and (lse - exact_lse).abs().max() < 1e-5
    ours = backward(do, q, k, v, o, lse, cu, cu, scale)
    theirs = reference.attention_backward(do.float(), q.float(), k.float(), v.float(), exact, exact_lse, cu_q=cu, cu_k=cu, scale=scale)
    for name, got, want in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
        assert (got.float() - want).abs().max() < 0.02 * want.abs().max(), name
