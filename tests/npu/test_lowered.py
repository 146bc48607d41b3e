"""Our Triton kernels as triton-ascend lowers them: all to linalg, those the family needs to HIVM as recorded; and linalg that runs on this CPU.

``make test-ascend`` runs this. The recorded table is ``lowered_triton_ascend.txt``; ``make lower-ascend`` writes it anew.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = os.environ.get("ASCEND_WHEEL") == "1" and all(importlib.util.find_spec(name) is not None for name in ("triton", "ascendnpuir"))
pytestmark = pytest.mark.skipif(not HERE, reason="triton-ascend is needed: make test-ascend makes an environment with it")

if HERE:
    from tests.npu import execute, lower
    from tio_megatron.kernels import linear, router, triton_family
    from tio_megatron.kernels.linear import triton as product
    from tio_megatron.kernels.math import triton as sums
    from tio_megatron.kernels.router import triton as routing
    from tio_megatron.kernels.swiglu import triton as activation
    from tio_megatron.testing import assert_same_bytes

needs_mlir = pytest.mark.skipif(not HERE or execute.tools() is None, reason="mlir-19-tools and llvm-19 are needed, or MLIR_BIN")


def test_every_kernel_lowers_as_recorded() -> None:
    recorded = lower.FILE.read_text().splitlines()[1:]
    found = list(lower.table())
    assert found == recorded
    assert [row.split()[0] for row in found if "no linalg" in row] == ["entropy_backward"]  # triton-ascend's own lowering aborts on it
    for what in ("matmul, 1 leaf", "matmul, 4 leaves", "swiglu", "rope", "route", "combine", "vocab_sumexp", "gather_logprob", "rms_norm_backward"):
        assert all("HIVM" in row and "no HIVM" not in row for row in found if row.startswith(f"{what} ")), what


@needs_mlir
@pytest.mark.parametrize("leaves", [1, 4])
def test_the_lowered_product_sees_neither_rows_nor_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: int) -> None:
    monkeypatch.setattr(triton_family, "small", lambda device: True)
    g = torch.Generator().manual_seed(leaves)
    a, b = torch.randn(130, 256, generator=g).bfloat16(), torch.randn(96, 256, generator=g).bfloat16()
    with execute.executing(tmp_path):
        whole = product.matmul(a, b, leaves, False, torch.bfloat16)
        for start, stop in ((0, 1), (5, 12), (64, 130), (129, 130)):
            assert_same_bytes(product.matmul(a[start:stop].contiguous(), b, leaves, False, torch.bfloat16), whole[start:stop], f"rows {start}:{stop}")
        assert_same_bytes(product.matmul(a, b[7:40].contiguous(), leaves, False, torch.bfloat16), whole[:, 7:40].contiguous(), "columns")
        parts = [product.matmul(a[:, 64 * i : 64 * i + 64], b[:, 64 * i : 64 * i + 64], 1, False, torch.float32) for i in range(4)]
        assert leaves == 1 or torch.equal(sums.tree_add(torch.stack(parts)).bfloat16(), whole), "four ranks, each a leaf"
    exact = a.double() @ b.double().t()
    assert (whole.double() - exact).abs().max() < 2**-7 * exact.abs().max()
    if leaves == 1:
        other = product_by_leaves(a, b)
        assert (other != whole).any(), "another order gives other bytes"


def product_by_leaves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Negative control: the CPU family's product with eight leaves."""
    return linear.linear(a, b, leaves=8)


@needs_mlir
def test_the_lowered_softmax_sees_no_rows_and_has_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    logits = torch.randn(37, 128, generator=torch.Generator().manual_seed(1)) * 4
    with execute.executing(tmp_path):
        whole = routing.scores(logits)
        for start, stop in ((0, 1), (5, 12), (36, 37)):
            assert_same_bytes(routing.scores(logits[start:stop].contiguous()), whole[start:stop], f"rows {start}:{stop}")
    assert_same_bytes(whole, router.scores(logits), "triton-ascend's linalg against the CPU family")
    with pytest.raises(AssertionError):
        assert_same_bytes(whole, logits.softmax(1), "torch's order")


@needs_mlir
def test_the_lowered_activation_has_the_bytes_of_the_cpu(tmp_path: Path) -> None:
    from tio_megatron.kernels.swiglu import swiglu

    gate_up = torch.randn(5, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    with execute.executing(tmp_path):
        lowered = activation.swiglu(gate_up)
    assert_same_bytes(lowered, swiglu(gate_up), "triton-ascend's linalg against the CPU family")
