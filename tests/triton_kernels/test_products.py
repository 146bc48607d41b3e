"""The Triton product: no row, column, batch, cut or neighbour changes a byte; the leaves are the contract's."""

import pytest
import torch

from tio_megatron.contract import Contract, ReductionTree
from tio_megatron.kernels.grouped import triton as grouped
from tio_megatron.kernels.linear import reference
from tio_megatron.kernels.linear.triton import TERMS, linear_packed, matmul
from tio_megatron.testing import assert_same_bytes

FP32, BF16 = torch.float32, torch.bfloat16


def operands(m, n, k):
    return torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()


@pytest.mark.parametrize("leaves", [1, 4, 8])
def test_rows_and_columns_do_not_matter(leaves):
    a, b = operands(70, 140, 512)
    y = matmul(a, b, leaves, False, FP32)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 68)):
        assert_same_bytes(matmul(a[rows], b, leaves, False, FP32), y[rows], f"rows {rows}")
    assert_same_bytes(matmul(a[5:6], b[130:], leaves, False, FP32), y[5:6, 130:], "one row, some columns")
    assert_same_bytes(matmul(a.flip(0), b.flip(0), leaves, False, FP32), y.flip(0, 1), "in another place of the tile")
    assert_same_bytes(matmul(a, b, leaves, False, BF16), y.bfloat16(), "one rounding at the root")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_cut_of_the_terms_joins_to_the_whole(ranks):
    a, b = operands(3, 130, 1024)
    whole, tree = matmul(a, b, 8, False, FP32), ReductionTree(8)
    each, width = 8 // ranks, 1024 // ranks
    parts = []
    for rank in range(ranks):
        terms = slice(rank * width, (rank + 1) * width)
        (node,) = tree.frontier(rank * each, (rank + 1) * each)
        parts.append({node: matmul(a[:, terms], b[:, terms], each, False, FP32)})
    assert_same_bytes(tree.combine(parts), whole, f"{ranks} ranks")


def test_more_leaves_than_a_program_holds():
    """The vocabulary's gradient has a leaf per block of 128 rows: nodes of eight leaves, then the tree over them."""
    a, b = operands(2, 20, 20 * 32)
    tree = ReductionTree(20)
    leaves = [matmul(a[:, i * 32 : i * 32 + 32], b[:, i * 32 : i * 32 + 32], 1, False, FP32) for i in range(20)]
    assert_same_bytes(matmul(a, b, 20, False, FP32), tree.reduce(leaves), "20 leaves")
    assert_same_bytes(matmul(a, b, 20, False, BF16), tree.reduce(leaves).bfloat16(), "rounded once")


def one_term_a_block(turned=False):
    """Four blocks with one term each. Ascending, 2**24 swallows both ones: 0. Descending, neither is lost: 2."""
    x = torch.zeros(4 * TERMS)
    x[::TERMS] = torch.tensor([2.0**24, 1, 1, -(2.0**24)]) if not turned else torch.tensor([-(2.0**24), 1, 1, 2.0**24])
    return x.expand(3, -1).contiguous().bfloat16(), torch.ones(5, 4 * TERMS).bfloat16()


@pytest.mark.parametrize("turned, y", [(False, 0.0), (True, 2.0)])
def test_blocks_of_a_leaf_are_walked_in_ascending_order(turned, y):
    """In fp32 and bf16, plain and grouped, and over the rows of an expert: no rounding of the result hides the walk."""
    x, w = one_term_a_block(turned)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    for out in (FP32, BF16):
        wanted = torch.full((3, 5), y, dtype=out)
        assert_same_bytes(matmul(x, w, 1, False, out), wanted, f"product, {out}")
        assert_same_bytes(grouped.grouped(x, [w, w], offsets, 1, False, out), wanted, f"grouped, {out}")
    rows = torch.tensor([0, 4 * TERMS], dtype=torch.int32)
    dw = grouped.grouped_wgrad(x.T.contiguous(), w.T.contiguous(), rows)
    assert_same_bytes(dw.reshape(3, 5), torch.full((3, 5), y, dtype=dw.dtype), "gradient of an expert")


def test_the_order_shows():
    """Negative controls: other leaves, and blocks that do not start with their leaf, give other bytes."""
    a, b = operands(8, 128, 512)
    y = matmul(a, b, 4, False, FP32)
    for what, other in (("leaves", matmul(a, b, 8, False, FP32)), ("blocks", matmul(a.roll(TERMS // 4, 1), b.roll(TERMS // 4, 1), 4, False, FP32))):
        with pytest.raises(AssertionError):
            assert_same_bytes(other, y, what)


def test_leaves_are_whole_whatever_their_length():
    a, b = operands(5, 128, 4 * 24)
    tree = ReductionTree(4)
    leaves = [matmul(a[:, i * 24 : i * 24 + 24], b[:, i * 24 : i * 24 + 24], 1, False, FP32) for i in range(4)]
    assert_same_bytes(matmul(a, b, 4, False, FP32), tree.reduce(leaves), "leaves of 24 terms")


def test_gate_and_up_in_pairs():
    """A paired leaf is leaf j of gate, then leaf j of up, in one accumulator; two ranks hold the halves of both."""
    dy, w = torch.randn(3, 512).bfloat16(), torch.randn(512, 40).bfloat16()
    whole = matmul(dy, w.t(), 4, True, FP32)
    shards = [torch.arange(512).view(2, 2, 128)[:, rank].flatten() for rank in range(2)]
    halves = [matmul(dy[:, mine], w[mine].t(), 2, True, FP32) for mine in shards]
    assert_same_bytes(halves[0] + halves[1], whole, "two ranks")


def test_strides():
    a, b = operands(6, 70, 64)
    whole = matmul(a, b, 1, False, FP32)
    assert_same_bytes(matmul(a.t().contiguous().t(), b.t().contiguous().t(), 1, False, FP32), whole, "transposed")
    wide = torch.full((6, 200), float("nan"), dtype=BF16)
    wide[:, 50:114] = a
    assert_same_bytes(matmul(wide[:, 50:114], b, 1, False, FP32), whole, "inside a wider matrix")
    assert_same_bytes(linear_packed(a, b, 70, 1, FP32), whole, "packed")


def test_grouped_is_the_plain_product_of_each_expert():
    x = torch.randn(70, 128).bfloat16()
    stacked = torch.randn(5, 96, 128).bfloat16()
    offsets = torch.tensor([0, 0, 1, 66, 66, 70])
    y = grouped.grouped(x, list(stacked), offsets, 2, False, BF16)
    apart = [w.clone() for w in stacked.flip(0)][::-1]
    assert_same_bytes(grouped.grouped(x, apart, offsets, 2, False, BF16), y, "weights anywhere in memory")
    assert_same_bytes(grouped.grouped_packed(x, stacked, 96, offsets, 2, BF16), y, "packed")
    for e, (lo, hi) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        assert_same_bytes(y[lo:hi], matmul(x[lo:hi], stacked[e], 2, False, BF16), f"expert {e}")
    dw = grouped.grouped_wgrad(y, x, offsets)
    assert_same_bytes(dw[2], matmul(y[1:66].t(), x[1:66].t(), 1, False, FP32), "gradient")
    assert_same_bytes(dw[3], torch.zeros(96, 128), "an expert without rows")


def test_an_fp32_gradient_is_taken_exactly():
    """Three bf16 parts: far closer than one rounding to bf16 would be, and the same for every row."""
    d, w = torch.randn(5, 64) * torch.logspace(-6, 3, 64), torch.randn(64, 32).bfloat16()
    got, exact = matmul(d, w.t(), 1, False, FP32), d.double() @ w.double()
    size = d.double().abs() @ w.double().abs()
    assert ((got - exact).abs() / size).max() < 2**-20 < ((matmul(d.bfloat16(), w.t(), 1, False, FP32) - exact).abs() / size).max()
    assert_same_bytes(matmul(d[4:], w.t(), 1, False, FP32), got[4:], "one row")


def test_no_row_sees_another():
    a, b = operands(4, 128, 64)
    clean = matmul(a, b, 1, False, FP32)
    a[1, 3] = float("nan")
    assert_same_bytes(matmul(a, b, 1, False, FP32)[[0, 2, 3]], clean[[0, 2, 3]], "a NaN stays in its row")


def test_nothing_to_add_and_what_is_refused():
    assert_same_bytes(matmul(torch.empty(3, 0).bfloat16(), torch.empty(4, 0).bfloat16(), 1, False, FP32), torch.zeros(3, 4), "no terms")
    assert matmul(torch.empty(0, 64).bfloat16(), torch.empty(4, 64).bfloat16(), 1, False, BF16).shape == (0, 4)
    with pytest.raises(ValueError, match="the weight is torch.float32; this kernel family multiplies torch.bfloat16"):
        matmul(torch.ones(2, 64).bfloat16(), torch.ones(2, 64), 1, False, FP32)
    assert Contract(family="triton-sm90").cuts.expert_row == 1


def test_error_beside_the_reference():
    """Within the bound of an ascending sum of a leaf's products: the reference and the kernel are both that close to the exact value."""
    a, b = operands(4, 16, 512)
    exact, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    for got in (matmul(a, b, 4, False, FP32), reference.matmul(a, b, 4)):
        assert ((got - exact).abs() / size).max() < 128 * 2**-24
