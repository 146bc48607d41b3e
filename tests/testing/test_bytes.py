"""The judge itself: it must see what torch.equal does not, and point to the first difference."""

import pytest
import torch

from tio_megatron.testing import assert_same_bytes, first_mismatch, poison


def test_sees_the_sign_of_zero_and_shows_where():
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 2] = -0.0
    assert torch.equal(a, b)
    with pytest.raises(AssertionError, match=r"y: \[1, 2\]: 00000000 \(0.0\) against 80000000 \(-0.0\) \(1 of 6 elements differ\)"):
        assert_same_bytes(a, b, "y")


def test_nan_position_counts_and_payload_does_not():
    a = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([-0x3FFFFF, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert_same_bytes(a, b)
    assert first_mismatch(a, b.flip(0)).index == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_every_dtype(dtype):
    a = torch.tensor([1, 0, 1]).to(dtype)
    assert_same_bytes(a, a.clone())
    b = a.clone()
    b[1] = 1
    assert first_mismatch(a, b).index == (1,)


def test_type_shape_and_containers():
    a = torch.ones(2)
    assert "torch.float32 against torch.bfloat16" in str(first_mismatch(a, a.bfloat16()))
    assert "shape (2,) against (2, 1)" in str(first_mismatch(a, a[:, None]))
    assert str(first_mismatch({"x": [a, 0.0]}, {"x": [a, -0.0]})).startswith("['x'][1][]: 0000000000000000 (0.0)")
    assert "other keys" in str(first_mismatch({"x": 1}, {"y": 1}))
    assert "2 items against 1" in str(first_mismatch([a, a], [a]))
    assert first_mismatch("a", None) is not None
    assert_same_bytes(torch.empty(0, 3), torch.empty(0, 3))
    assert_same_bytes(torch.tensor(1.0), torch.tensor(1.0))
    assert_same_bytes(torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(2, 3).t().contiguous())


def test_poison_fills_and_restores():
    before = torch.empty
    x = torch.zeros(2, dtype=torch.bfloat16)
    with poison():
        for t in (torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 2), (1, 2)), torch.empty(2, dtype=torch.float64)):
            assert t.isnan().all()
        assert torch.empty(1, dtype=torch.int32).item() == -(2**31)
        assert torch.empty(1, dtype=torch.bool).item() is True
        assert torch.empty(3, device="meta").shape == (3,)
    assert torch.empty is before
    with pytest.raises(RuntimeError, match="boom"), poison():
        raise RuntimeError("boom")
    assert torch.empty is before
