"""Vocabulary embedding: bytes are moved, any shard's rows are its own, the gradient adds tokens in order."""

from __future__ import annotations

import pytest
import torch

from tio_megatron.kernels.embedding import embedding, embedding_backward, reference
from tio_megatron.kernels.linear import PackedWeight
from tio_megatron.testing import assert_same_bytes


def test_bytes_are_the_references(isa: str, dtype: torch.dtype) -> None:
    w, ids, dout = torch.randn(50, 33).to(dtype), torch.randint(0, 120, (4, 30)), torch.randn(4, 30, 33).to(dtype)
    w[3, 0], w[4, 1] = -0.0, float("nan")
    ids[0, :2] = torch.tensor([43, 44])
    assert_same_bytes(embedding(ids, w, 40), reference.embedding(ids, w, 40))
    assert_same_bytes(embedding_backward(dout, ids, 50, 40), reference.embedding_backward(dout, ids, 50, 40))


def test_shards_make_the_whole() -> None:
    w, ids = torch.randn(96, 8), torch.randint(0, 96, (30,))
    parts = [embedding(ids, w[lo : lo + 32], lo) for lo in (0, 32, 64)]
    owner = ids // 32
    assert_same_bytes(torch.stack(parts)[owner, torch.arange(30)], embedding(ids, w))
    for r, part in enumerate(parts):
        assert_same_bytes(part[owner != r], torch.zeros(int((owner != r).sum()), 8))


@pytest.mark.parametrize("vocabulary", [1, 31, 33, 96])
def test_a_packed_weight_gives_the_same_rows(dtype: torch.dtype, vocabulary: int) -> None:
    """Every place in a panel, the last panel's padding left alone; ids outside the shard on both sides."""
    w, ids = torch.randn(vocabulary, 70).to(dtype), torch.arange(38, 42 + vocabulary)
    w[-1, :2] = torch.tensor([-0.0, float("nan")])
    packed = PackedWeight.from_weight(w)
    assert_same_bytes(embedding(ids, packed, 40), embedding(ids, w, 40))
    assert_same_bytes(embedding(ids[None], packed, 40), embedding(ids, w, 40)[None])
    assert embedding(ids[:0], packed).shape == (0, 70)


def test_empty_and_autograd() -> None:
    assert embedding(torch.empty(0, dtype=torch.int64), torch.ones(4, 8)).shape == (0, 8)
    assert_same_bytes(embedding_backward(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), 4), torch.zeros(4, 8))
    w, ids, dout = torch.randn(5, 8, requires_grad=True), torch.tensor([1, 1, 4]), torch.randn(3, 8)
    assert_same_bytes(torch.autograd.grad(embedding(ids, w), w, dout)[0], embedding_backward(dout, ids, 5))
    with pytest.raises(ValueError, match="int64"):
        embedding(torch.tensor([1.0]), torch.ones(4, 8))
