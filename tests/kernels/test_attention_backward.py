"""Attention backward: the reference's bytes, run to run and thread to thread, and sequences that do not see each other."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels.attention import attention, attention_backward, reference
from tio_megatron.testing import assert_same_bytes, first_mismatch

Tensors = tuple[torch.Tensor, ...]


def _cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _case(queries: list[int], keys: list[int], heads: int, groups: int, size: int, dtype: torch.dtype) -> tuple[Tensors, dict[str, object]]:
    t, s = sum(queries), sum(keys)
    q, do = torch.randn(t, heads, size).to(dtype), torch.randn(t, heads, size).to(dtype)
    k, v = torch.randn(s, groups, size).to(dtype), torch.randn(s, groups, size).to(dtype)
    where = {"cu_q": _cu(*queries), "cu_k": _cu(*keys), "scale": size**-0.5}
    o, lse = attention(q, k, v, **where)  # type: ignore[arg-type]
    return (do, q, k, v, o, lse), where


@pytest.mark.parametrize("heads, groups, size", [(4, 1, 64), (2, 2, 128), (3, 1, 48)])
@pytest.mark.parametrize("queries, keys", [([1], [1]), ([70], [70]), ([5, 0, 66], [5, 2, 150]), ([3], [131])])
def test_bytes_are_the_references(isa: str, dtype: torch.dtype, heads: int, groups: int, size: int, queries: list[int], keys: list[int]) -> None:
    args, where = _case(queries, keys, heads, groups, size, dtype)
    assert_same_bytes(attention_backward(*args, **where), reference.attention_backward(*args, **where))  # type: ignore[arg-type]


def test_bytes_are_the_references_over_several_blocks(isa: str) -> None:
    args, where = _case([211], [211], 2, 1, 64, torch.bfloat16)
    assert_same_bytes(attention_backward(*args, **where), reference.attention_backward(*args, **where))  # type: ignore[arg-type]


def test_threads_packing_and_heads_change_nothing(dtype: torch.dtype) -> None:
    args, where = _case([90, 130], [90, 130], 4, 2, 64, dtype)
    whole = attention_backward(*args, **where)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_same_bytes(attention_backward(*args, **where), whole)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    for rows in (slice(0, 90), slice(90, 220)):
        alone = {"cu_q": _cu(rows.stop - rows.start), "cu_k": _cu(rows.stop - rows.start), "scale": 0.125}
        assert_same_bytes(attention_backward(*(a[rows] for a in args), **alone), tuple(g[rows] for g in whole))  # type: ignore[arg-type]
    do, q, k, v, o, lse = args
    half = attention_backward(do[:, 2:], q[:, 2:], k[:, 1:], v[:, 1:], o[:, 2:], lse[:, 2:], **where)  # type: ignore[arg-type]
    assert_same_bytes(half, (whole[0][:, 2:], whole[1][:, 1:], whole[2][:, 1:]))


def test_control_heads_in_descending_order_differ() -> None:
    args, where = _case([80], [80], 4, 1, 64, torch.float32)
    do, q, k, v, o, lse = args
    turned = attention_backward(do.flip(1), q.flip(1), k, v, o.flip(1), lse.flip(1), **where)  # type: ignore[arg-type]
    whole = attention_backward(*args, **where)  # type: ignore[arg-type]
    assert_same_bytes(turned[0].flip(1), whole[0])
    assert first_mismatch(turned[1], whole[1]) and first_mismatch(turned[2], whole[2])


def test_nan_behind_the_mask_stays_there(isa: str, dtype: torch.dtype) -> None:
    """A NaN key reaches the rows that see it, and through them every key they see; rows and keys of another sequence never."""
    args, where = _case([100, 70], [100, 70], 2, 1, 64, dtype)
    clean = attention_backward(*args, **where)  # type: ignore[arg-type]
    do, q, k, v, _, _ = args
    k[90], v[95] = float("nan"), float("nan")
    o, lse = attention(q, k, v, **where)  # type: ignore[arg-type]
    dq, dk, dv = attention_backward(do, q, k, v, o, lse, **where)  # type: ignore[arg-type]
    assert_same_bytes(dq[:90], clean[0][:90])
    for got, was in zip((dq, dk, dv), clean, strict=True):
        assert_same_bytes(got[100:], was[100:])
    assert dq[90:100].isnan().all() and dk[:95].isnan().all()


def test_autograd_is_the_backward() -> None:
    args, where = _case([40], [40], 4, 2, 64, torch.float32)
    do, q, k, v, o, lse = args
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = attention(*leaves, **where)  # type: ignore[arg-type]
    assert_same_bytes(torch.autograd.grad(out, leaves, do), attention_backward(*args, **where))  # type: ignore[arg-type]
