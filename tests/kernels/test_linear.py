"""The product against its definition, byte for byte, and everything that must not change a byte of it."""

import gc
import os
import subprocess
import sys
import weakref
from fractions import Fraction

import pytest
import torch

from tio_megatron.contract import ReductionTree
from tio_megatron.kernels import library
from tio_megatron.kernels.exact import fma
from tio_megatron.kernels.linear import PackedWeight, linear, matmul, reference
from tio_megatron.testing import assert_same_bytes, first_mismatch

DTYPES = (torch.float32, torch.bfloat16)

# (M, N, K, leaves): K below, at and above one chain; leaves of one and of several chains; odd N; 3 and 5 chains in a leaf
SHAPES = [
    (1, 5, 8, 1),
    (3, 33, 600, 2),
    (13, 70, 768, 8),
    (7, 32, 2048, 4),
    (2, 100, 300, 1),
    (30, 64, 96, 1),
    (5, 17, 1, 1),
    (14, 31, 1284, 1),
    (4, 48, 90, 6),
]


def operands(m, n, k, dtype=torch.float32, w_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # magnitudes over many binades, so that every order gives other bytes
    spread = lambda rows: torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-6, 7, (rows, k), generator=generator).float())  # noqa: E731
    return spread(m).to(dtype), spread(n).to(w_dtype or dtype)


def sequential(a, b, leaves):
    """The wrong order: leaves added one after another, as ranks do in a ring."""
    length = a.shape[1] // leaves
    parts = [reference.leaf(x, y) for x, y in zip(a.float().split(length, 1), b.float().split(length, 1), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class TestDefinition:
    def test_fma_is_correctly_rounded(self):
        eps = 2.0**-23
        # the exact sum lies just beside a tie of fp32; rounded to float64 first it would fall on the tie and then go the wrong way
        hard = [((1 + eps) * 2.0**-24, 1 - eps, 1 + eps), ((1 + eps) * 2.0**-24, -(1 - eps), 1 + 2 * eps), (2.0**-149, 0.75, 2.0**-149)]
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(3, 200, generator=generator) * torch.exp2(torch.randint(-60, 60, (3, 200), generator=generator).float())
        a, b, c = torch.cat([torch.tensor(hard).t(), random], 1)
        got = fma(a, b, c)
        steps = (torch.nextafter(got, torch.full_like(got, way)) for way in (-torch.inf, torch.inf))
        for x, y, z, here, *beside in zip(*(t.tolist() for t in (a, b, c, got, *steps)), strict=True):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            assert all(abs(exact - Fraction(here)) <= abs(exact - Fraction(other)) for other in beside)
        twice = (a.double() * b.double() + c.double()).float()
        assert first_mismatch(got, twice), "the control: two roundings must differ somewhere"

    def test_fma_keeps_special_values(self):
        inf, nan = torch.inf, torch.nan
        a, b = torch.tensor([inf, inf, nan, 0.0, -0.0, 3e38]), torch.tensor([1.0, 0.0, 1.0, -1.0, 1.0, 3e38])
        c = torch.tensor([-inf, 1.0, 1.0, -0.0, -0.0, 0.0])
        assert_same_bytes(fma(a, b, c), torch.tensor([nan, nan, nan, -0.0, -0.0, inf]))

    def test_paired_leaves(self):
        a, b = operands(2, 3, 24)
        order = [0, 1, 2, 12, 13, 14, 3, 4, 5, 15, 16, 17, 6, 7, 8, 18, 19, 20, 9, 10, 11, 21, 22, 23]
        assert_same_bytes(reference.matmul(a, b, 4, paired=True), reference.matmul(a[:, order], b[:, order], 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestKernelEqualsDefinition:
    @pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
    def test_all_forms(self, isa, shape, x_dtype, w_dtype):
        m, n, k, leaves = shape
        x, w = operands(m, n, k, x_dtype, w_dtype)
        want = reference.matmul(x, w, leaves)
        packed = PackedWeight.from_weight(w)
        assert_same_bytes(linear(x, w, leaves=leaves, out_dtype=torch.float32), want, "weight as it lies")
        assert_same_bytes(linear(x, packed, leaves=leaves, out_dtype=torch.float32), want, "packed")
        assert_same_bytes(linear(x, packed, leaves=leaves, out_dtype=torch.bfloat16), want.bfloat16(), "rounded once")
        assert_same_bytes(matmul(x.t().contiguous().t(), w.t().contiguous().t(), leaves=leaves), want, "transposed operands")
        wide_x, wide_w = torch.zeros(m, 3 * k, dtype=x_dtype), torch.zeros(n, 2 * k, dtype=w_dtype)
        wide_x[:, ::3], wide_w[:, ::2] = x, w
        assert_same_bytes(matmul(wide_x[:, ::3], wide_w[:, ::2], leaves=leaves), want, "strided operands")

    def test_paired(self, isa, shape):
        m, n, k, leaves = shape
        a, b = operands(m, n, 2 * k, torch.bfloat16)
        want = reference.matmul(a, b, leaves, paired=True)
        assert_same_bytes(matmul(a, b, leaves=leaves, paired=True), want)
        assert_same_bytes(matmul(a, b.t().contiguous().t(), leaves=leaves, paired=True), want)

    def test_pack_and_back(self, isa, shape):
        for dtype in DTYPES:
            w = operands(1, shape[1], shape[2], dtype)[1]
            assert_same_bytes(PackedWeight.from_weight(w).unpack(), w)
            assert_same_bytes(PackedWeight.from_weight(w.t().contiguous().t()).unpack(), w)


class TestWhatMustNotChangeAByte:
    def setup_method(self):
        self.x, self.w = operands(64, 96, 1536, torch.bfloat16)
        self.want = linear(self.x, self.w, leaves=8, out_dtype=torch.float32)

    def test_rows(self, isa):
        packed = PackedWeight.from_weight(self.w)
        for m in (1, 2, 3, 5, 6, 7, 11, 12, 13, 25, 64):
            for lo in (0, 64 - m):
                rows = self.x[lo : lo + m]
                assert_same_bytes(linear(rows, packed, leaves=8, out_dtype=torch.float32), self.want[lo : lo + m], f"{m} rows, packed")
                assert_same_bytes(linear(rows, self.w, leaves=8, out_dtype=torch.float32), self.want[lo : lo + m], f"{m} rows")

    def test_more_rows_than_a_task(self):
        x = self.x.repeat(7, 1)
        assert_same_bytes(linear(x, self.w, leaves=8, out_dtype=torch.float32), self.want.repeat(7, 1))

    def test_columns(self, isa):
        for parts in (1, 2, 3, 4, 6, 96):
            got = torch.cat([linear(self.x, w, leaves=8, out_dtype=torch.float32) for w in self.w.chunk(parts)], 1)
            assert_same_bytes(got, self.want, f"{parts} column parts")

    def test_cut_of_k_joined_by_the_tree(self):
        for ranks in (2, 4, 8):
            parts = [linear(x, w, leaves=8 // ranks, out_dtype=torch.float32) for x, w in zip(self.x.chunk(ranks, 1), self.w.chunk(ranks, 1), strict=True)]
            assert_same_bytes(ReductionTree(ranks).reduce(parts), self.want, f"{ranks} ranks")

    def test_threads(self):
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert_same_bytes(linear(self.x, self.w, leaves=8, out_dtype=torch.float32), self.want, f"{threads} threads")
        finally:
            torch.set_num_threads(before)

    def test_leading_axes(self):
        assert_same_bytes(linear(self.x.view(4, 2, 8, -1), self.w, leaves=8, out_dtype=torch.float32), self.want.view(4, 2, 8, -1))
        assert_same_bytes(linear(self.x[0], self.w, leaves=8, out_dtype=torch.float32), self.want[0])

    def test_processes_with_each_instruction_set(self):
        code = (
            "import hashlib, torch; from tests.kernels.test_linear import operands; from tio_megatron.kernels.linear import linear\n"
            "x, w = operands(9, 40, 520, torch.bfloat16)\n"
            "print(hashlib.sha256(linear(x, w, leaves=2, out_dtype=torch.float32).numpy().tobytes()).hexdigest())"
        )
        # memory from the allocator is filled with 0x7f: a scratch value read before it is written would show
        env = {**os.environ, "MALLOC_PERTURB_": "128", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        seen = {subprocess.check_output([sys.executable, "-c", code], env={**env, "TIO_CPU_ISA": name}) for name in library.supported_isas()}
        assert len(seen) == 1


class TestNegativeControls:
    def test_a_wrong_order_differs(self):
        x, w = operands(8, 32, 1024)
        assert first_mismatch(sequential(x, w, 8), linear(x, w, leaves=8)), "leaves added one after another must give other bytes"
        assert first_mismatch(linear(x, w, leaves=4), linear(x, w, leaves=8)), "another number of leaves must give other bytes"
        assert first_mismatch(matmul(x, w, leaves=4, paired=True), matmul(x, w, leaves=4)), "paired leaves must give other bytes"

    def test_torch_changes_with_rows_or_cut(self):
        x, w = operands(64, 256, 2048)
        whole = torch.nn.functional.linear(x, w)
        rows = torch.cat([torch.nn.functional.linear(row[None], w) for row in x])
        halves = sum(torch.nn.functional.linear(a, b) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True))
        assert first_mismatch(whole, rows) or first_mismatch(whole, halves)

    def test_the_handed_input(self):
        # four terms for which every order of addition has another answer
        x, w = torch.tensor([[1e20, 1.0, -1e20, 1.0]]), torch.ones(1, 4)
        assert linear(x, w, leaves=4).item() == 0.0 and linear(x, w, leaves=2).item() == 0.0
        assert linear(x, w, leaves=1).item() == 1.0


class TestSpecialValues:
    def test_nan_and_infinity_stay_in_their_row_and_column(self, isa):
        x, w = operands(13, 40, 300)
        want = linear(x, w, leaves=1)
        bad_x, bad_w = x.clone(), w.clone()
        bad_x[4, 100], bad_w[33, 7] = torch.nan, torch.inf
        got = linear(bad_x, bad_w, leaves=1)
        assert got[4].isnan().all() and not got[:4, :33].isnan().any()
        keep = torch.ones(13, 40, dtype=torch.bool)
        keep[4], keep[:, 33] = False, False
        assert_same_bytes(got[keep], want[keep])

    def test_padding_columns_never_reach_the_output(self, isa):
        x = torch.full((3, 40), torch.inf)  # times the zeros that pad a panel this is NaN
        out = linear(x, torch.ones(5, 40), leaves=1)
        assert out.shape == (3, 5) and (out == torch.inf).all()

    def test_negative_zero(self, isa):
        # a chain starts from +0, so terms of -0 give +0
        assert_same_bytes(matmul(torch.full((1, 8), -0.0), torch.ones(1, 8), leaves=2), torch.tensor([[0.0]]))
        # a sum that underflows to -0 when it is rounded keeps its sign
        tiny = torch.tensor([[-(2.0**-149)]])
        assert_same_bytes(matmul(tiny, torch.ones(1, 1), out_dtype=torch.bfloat16), torch.tensor([[-0.0]]).bfloat16())

    def test_denormals_survive_flush_to_zero(self, isa):
        x, w = torch.full((2, 4), 2.0**-140), torch.full((3, 4), 0.5)
        assert torch.set_flush_denormal(True)
        try:
            got = linear(x, w, leaves=1)
            still_on = (torch.full((1,), 2.0**-140) * 1.0).item() == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert_same_bytes(got, torch.full((2, 3), 2.0**-139))
        assert still_on, "the caller's mode must come back"

    def test_rounding_to_bf16(self, isa):
        values = torch.tensor([1.00390625, 1.01171875, 3.3961775e38, -3.4e38, torch.nan, -torch.inf, 2.0**-133, 0.0])
        one = torch.ones(1, 1)
        assert_same_bytes(matmul(values[:, None], one, out_dtype=torch.bfloat16)[:, 0], values.bfloat16())

    def test_empty(self):
        assert linear(torch.ones(0, 16), torch.ones(4, 16), leaves=2).shape == (0, 4)
        assert linear(torch.ones(3, 0, 16), torch.ones(4, 16), leaves=2).shape == (3, 0, 4)
        assert matmul(torch.ones(3, 16), torch.ones(0, 16)).shape == (3, 0)
        assert_same_bytes(matmul(torch.ones(2, 0), torch.ones(3, 0)), torch.zeros(2, 3))


class TestWeightsThatChange:
    @pytest.mark.parametrize("change", ["copy", "data", "view", "optimizer", "swap"])
    def test_every_change_is_seen(self, change):
        x, w = operands(3, 20, 64)
        parameter = torch.nn.Parameter(w.clone())
        before = linear(x, parameter, leaves=2)
        version = parameter._version
        if change == "copy":
            with torch.no_grad():
                parameter.mul_(1.5)
        elif change == "data":
            parameter.data.mul_(1.5)
            assert parameter._version == version, "the reason why no copy is kept by version"
        elif change == "view":
            parameter.data.view(-1)[::2] *= 1.5
        elif change == "optimizer":
            parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD([parameter], lr=0.5).step()
        else:
            parameter.data = parameter.data * 1.5
        after = linear(x, parameter, leaves=2)
        assert first_mismatch(before, after)
        assert_same_bytes(after, reference.matmul(x, parameter.data, 2))

    def test_nothing_of_a_weight_is_kept(self):
        x, w = operands(3, 20, 64)
        seen = weakref.ref(w)
        linear(x, w, leaves=2)
        del w
        gc.collect()
        assert seen() is None

    def test_packed_weight_updates_in_its_memory(self):
        for dtype in DTYPES:
            x, w = operands(3, 50, 64, dtype)
            packed = PackedWeight.from_weight(torch.zeros_like(w))
            address = packed.packed.data_ptr()
            assert packed.shape == (50, 64) and packed.dtype == dtype and packed.nbytes == 64 * 64 * w.element_size()
            packed.update_(w)
            assert packed.packed.data_ptr() == address
            assert_same_bytes(linear(x, packed, leaves=2), linear(x, w, leaves=2))
            into = torch.zeros(60, 80, dtype=dtype)[:50, :64]
            assert packed.unpack(out=into) is into
            assert_same_bytes(into, w)


class TestOperators:
    def test_the_default_dtype_does_not_matter(self):
        x, w = operands(4, 10, 32)
        want = linear(x, w, leaves=2)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert_same_bytes(linear(x, w, leaves=2), want)
            assert_same_bytes(linear(x, PackedWeight.from_weight(w), leaves=2), want)
            assert_same_bytes(reference.matmul(x, w, 2), want)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_meta_tensors_give_shapes(self):
        out = linear(torch.ones(2, 3, 8, device="meta"), torch.ones(5, 8, device="meta"), leaves=2, out_dtype=torch.bfloat16)
        assert out.shape == (2, 3, 5) and out.dtype == torch.bfloat16 and out.is_meta


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: linear(torch.ones(2, 8), torch.ones(3, 9), leaves=1), r"\(2, 8\) and \(3, 9\) share no last axis"),
            (lambda: linear(torch.ones(2, 8), torch.ones(9), leaves=1), "share no last axis"),
            (lambda: linear(torch.ones(2, 12), torch.ones(3, 12), leaves=8), r"12 terms do not divide into 8 equal leaves; \[1, 2, 4\] would work"),
            (lambda: linear(torch.ones(2, 12), torch.ones(3, 12), leaves=0), "into 0 equal leaves"),
            (lambda: matmul(torch.ones(2, 12), torch.ones(3, 12), leaves=4, paired=True), r"halves do not divide into 4 equal leaves; \[1, 2\] would work"),
            (lambda: linear(torch.ones(2, 8).half(), torch.ones(3, 8), leaves=1), "dtype torch.float16 is not supported; use torch.float32 or torch.bfloat16"),
            (lambda: linear(torch.ones(2, 8), torch.ones(3, 8), leaves=1, out_dtype=torch.float64), "torch.float64 is not supported"),
            (lambda: linear(torch.ones(2, 8), torch.ones(3, 8, device="meta"), leaves=1), "operands on cpu and meta"),
            (lambda: PackedWeight.from_weight(torch.ones(8)), r"\(8,\) on cpu is not \[N, K\]"),
            (lambda: PackedWeight.from_weight(torch.ones(8, 8).half()), "float16 is not supported"),
            (lambda: PackedWeight.from_weight(torch.ones(8, 8)).unpack(torch.ones(9, 8).t()), r"\(8, 9\) with strides \(1, 8\) cannot take"),
            (lambda: PackedWeight.from_weight(torch.ones(8, 8)).update_(torch.ones(8, 9)), r"\(8, 8\) torch.float32 cannot take \(8, 9\)"),
            (lambda: PackedWeight.from_weight(torch.ones(8, 8)).update_(torch.ones(8, 8).bfloat16()), "cannot take"),
        ],
    )
    def test_said_with_what_works(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()
