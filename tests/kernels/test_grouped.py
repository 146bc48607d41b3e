"""The grouped products against their definition, byte for byte: ragged and empty experts, gradients, packed weights that change."""

import pytest
import torch

from tio_megatron.kernels.grouped import PackedExperts, grouped_dgrad, grouped_linear, grouped_wgrad, reference
from tio_megatron.kernels.linear import linear
from tio_megatron.testing import assert_same_bytes, first_mismatch

EXPERTS, N, K = 6, 40, 96
OFFSETS = torch.tensor([0, 3, 3, 16, 17, 17, 30])


def case(dtype=torch.float32, n=N, k=K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, k, generator=generator).to(dtype)
    w = torch.randn(EXPERTS, n, k, generator=generator).to(dtype)
    return x, w


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
class TestKernelEqualsDefinition:
    def test_forward(self, isa, dtype):
        x, w = case(dtype)
        want = reference.grouped_linear(x, w, OFFSETS, 4, torch.float32)
        forms = {"tensor": w, "list": list(w), "packed": PackedExperts.from_weights(w), "transposed": w.transpose(1, 2).contiguous().transpose(1, 2)}
        forms["of other strides"] = [w[0].t().contiguous().t(), *w[1:]]
        for name, weights in forms.items():
            assert_same_bytes(grouped_linear(x, weights, OFFSETS, leaves=4, out_dtype=torch.float32), want, name)
            assert_same_bytes(grouped_linear(x, weights, OFFSETS, leaves=4), want.to(dtype), f"{name}, rounded")

    @pytest.mark.parametrize("paired", (False, True))
    def test_dgrad(self, isa, dtype, paired):
        _, w = case(dtype)
        dy = torch.randn(30, N, generator=torch.Generator().manual_seed(1)).to(dtype)
        want = reference.grouped_dgrad(dy, w, OFFSETS, 4, torch.float32, paired)
        assert_same_bytes(grouped_dgrad(dy, w, OFFSETS, leaves=4, paired=paired, out_dtype=torch.float32), want)
        assert_same_bytes(grouped_dgrad(dy, list(w), OFFSETS, leaves=4, paired=paired), want.to(dtype))

    def test_wgrad(self, isa, dtype):
        x, _ = case(dtype)
        dy = torch.randn(30, N, generator=torch.Generator().manual_seed(1)).to(dtype)
        want = reference.grouped_wgrad(dy, x, OFFSETS)
        assert_same_bytes(grouped_wgrad(dy, x, OFFSETS), want)
        assert_same_bytes(grouped_wgrad(dy.t().contiguous().t(), x, OFFSETS), want, "strided")
        assert_same_bytes(want[1], torch.zeros(N, K), "an expert without rows")


def test_wgrad_over_more_than_one_chain():
    generator = torch.Generator().manual_seed(2)
    dy, x, offsets = torch.randn(700, 3, generator=generator), torch.randn(700, 5, generator=generator), torch.tensor([0, 600, 700])
    assert_same_bytes(grouped_wgrad(dy, x, offsets), reference.grouped_wgrad(dy, x, offsets))


def test_an_expert_alone_is_the_plain_product():
    x, w = case(torch.bfloat16)
    packed = PackedExperts.from_weights(w)
    got = grouped_linear(x, packed, OFFSETS, leaves=8)
    for e in range(EXPERTS):
        lo, hi = OFFSETS[e : e + 2].tolist()
        assert_same_bytes(got[lo:hi], linear(x[lo:hi], w[e], leaves=8))


def test_experts_over_ranks_and_rows_in_any_number():
    x, w = case(torch.bfloat16)
    whole = grouped_linear(x, w, OFFSETS, leaves=4)
    for cut in (1, 2, 4):
        row = int(OFFSETS[cut])
        left = grouped_linear(x[:row], w[:cut], OFFSETS[: cut + 1], leaves=4)
        right = grouped_linear(x[row:], w[cut:], OFFSETS[cut:] - row, leaves=4)
        assert_same_bytes(torch.cat([left, right]), whole, f"experts cut at {cut}")
    one_by_one = [grouped_linear(x[r : r + 1], w, (OFFSETS > r).long(), leaves=4) for r in range(30)]
    assert_same_bytes(torch.cat(one_by_one), whole, "one row at a time")


def test_threads():
    x, w = case(torch.bfloat16, n=256, k=768)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = grouped_linear(x, w, OFFSETS, leaves=8)
        torch.set_num_threads(2)
        assert_same_bytes(grouped_linear(x, w, OFFSETS, leaves=8), want)
    finally:
        torch.set_num_threads(before)


def test_negative_control():
    x, w = case()
    good = grouped_linear(x, w, OFFSETS, leaves=4)
    assert first_mismatch(good, grouped_linear(x, w, OFFSETS, leaves=1))
    assert first_mismatch(good, grouped_linear(x, w.roll(1, 0), OFFSETS, leaves=4))


def test_no_row_anywhere():
    _, w = case()
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    assert grouped_linear(torch.ones(0, K), w, offsets, leaves=4).shape == (0, N)
    assert grouped_dgrad(torch.ones(0, N), w, offsets, leaves=4).shape == (0, K)
    assert_same_bytes(grouped_wgrad(torch.ones(0, N), torch.ones(0, K), offsets), torch.zeros(EXPERTS, N, K))


def test_nan_stays_in_its_row():
    x, w = case()
    want = grouped_linear(x, w, OFFSETS, leaves=4)
    x[7, 3] = torch.nan
    got = grouped_linear(x, w, OFFSETS, leaves=4)
    dw = grouped_wgrad(got, x, OFFSETS)
    assert got[7].isnan().all()
    assert_same_bytes(torch.cat([got[:7], got[8:]]), torch.cat([want[:7], want[8:]]))
    assert dw[2].isnan().any() and not dw[[0, 1, 3, 4, 5]].isnan().any()


def test_packed_experts_update_in_their_memory():
    x, w = case(torch.bfloat16)
    packed = PackedExperts.from_weights(list(torch.zeros_like(w)))
    address = packed.packed.data_ptr()
    packed.update_(w)
    assert_same_bytes(grouped_linear(x, packed, OFFSETS, leaves=4), grouped_linear(x, w, OFFSETS, leaves=4))
    packed.update_(w[0], expert=2)
    w[2] = w[0]
    assert_same_bytes(packed.unpack(), w)
    assert_same_bytes(packed.unpack(out=torch.empty_like(w)), w)
    assert packed.packed.data_ptr() == address
    assert packed.shape == (EXPERTS, N, K) and packed.dtype == torch.bfloat16 and packed.nbytes == EXPERTS * 64 * K * 2


def test_a_refused_update_changes_nothing():
    _, w = case()
    packed = PackedExperts.from_weights(w)
    with pytest.raises(ValueError, match="cannot take"):
        packed.update_([*torch.zeros_like(w[:-1]), torch.zeros(N, K + 1)])
    assert_same_bytes(packed.unpack(), w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 3, 16, 17, 17, 29])}, "ascend from 0 to the number of rows, 30"),
        ({"offsets": torch.tensor([0, 5, 3, 16, 17, 17, 30])}, "ascend"),
        ({"offsets": OFFSETS[1:]}, r"\[E \+ 1\] for 6 experts"),
        ({"offsets": OFFSETS.int()}, "int64"),
        ({"leaves": 5}, r"96 terms do not divide into 5 equal leaves; \[1, 2, 4, 8, 16, 32\] would work"),
        ({"x": torch.ones(30, K + 1)}, "share no last axis"),
        ({"x": torch.ones(30, K).half()}, "float16 is not supported"),
        ({"w": []}, "at least one expert"),
        ({"w": [torch.ones(N, K)] * 5 + [torch.ones(N, K + 1)]}, "experts differ"),
    ],
)
def test_refusals(change, message):
    x, w = case()
    arguments = {"x": x, "w": w, "offsets": OFFSETS, "leaves": 4, **change}
    with pytest.raises(ValueError, match=message):
        grouped_linear(**arguments)
