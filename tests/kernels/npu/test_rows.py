"""Norms and products of the NPU family: one row's bytes whatever stands beside it, the published order, and what is left to the Triton kernels."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tio_megatron.kernels.grouped import npu as grouped
from tio_megatron.kernels.norm import npu as norm
from tio_megatron.kernels.npu import twin
from tio_megatron.testing import assert_same_bytes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("width", [128, 256, 2048])
def test_a_row_is_normalised_as_it_is_alone(width: int) -> None:
    x, w = torch.randn(37, width).bfloat16(), torch.randn(width).bfloat16()
    y = norm.rms_norm(x, w, 1e-6)
    for rows in (slice(0, 1), slice(5, 12), slice(36, 37)):
        assert_same_bytes(norm.rms_norm(x[rows], w, 1e-6), y[rows], f"rows {rows}")
    heads = norm.rms_norm(x.view(37, 1, width), w, 1e-6).view(37, width)
    assert_same_bytes(heads, y, "as heads")


def test_the_squares_are_folded_in_halves() -> None:
    """Terms that show the order: halves first makes pairs 64 apart cancel."""
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 64], x[0, 1] = 1e20, -1e20, 1.0
    assert twin.fold(x).item() == 1.0
    y = torch.zeros(1, 128)
    y[0, 0], y[0, 1], y[0, 64] = 1e20, -1e20, 1.0
    assert twin.fold(y).item() == 0.0 and twin.tree(y, 128).item() == 1.0


def test_other_widths_than_powers_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 96.*exact for powers of two"):
        norm.rms_norm(torch.ones(2, 96).bfloat16(), torch.ones(96).bfloat16(), 1e-6)


def test_a_row_of_a_product_is_what_it_is_alone() -> None:
    x, w = torch.randn(40, 64).bfloat16(), list(torch.randn(4, 24, 64).bfloat16().unbind(0))
    whole = grouped.grouped(x, w, torch.tensor([0, 10, 10, 33, 40]), 1, False, torch.bfloat16)
    for row, expert in ((0, 0), (9, 0), (10, 2), (39, 3)):
        offsets = torch.tensor([0, *(int(e >= expert) for e in range(4))])
        assert_same_bytes(grouped.grouped(x[row : row + 1], w, offsets, 1, False, torch.bfloat16), whole[row : row + 1], f"row {row}")


def test_terms_of_a_product_ascend() -> None:
    x = torch.tensor([[1.0, 1, 1, 1]]).bfloat16()
    w = torch.tensor([[2.0**30, 1, -(2.0**30), 1], [1, 2.0**30, -(2.0**30), 1]]).bfloat16()
    assert grouped.grouped(x, [w], torch.tensor([0, 1]), 1, False, torch.bfloat16).tolist() == [[1.0, 1.0]]
    wide = torch.cat([w, w + 1], 1)[:, : w.shape[1]]  # strides that the operator's documents do not know
    assert not wide.is_contiguous() and grouped.grouped(x, [wide], torch.tensor([0, 1]), 1, False, torch.bfloat16).tolist() == [[1.0, 1.0]]
    assert grouped.grouped(x, [w.flip(1)], torch.tensor([0, 1]), 1, False, torch.bfloat16).tolist() != [[1.0, 1.0]]


@pytest.mark.parametrize(("leaves", "dtype"), [(2, torch.bfloat16), (1, torch.float32)])
def test_what_the_operator_cannot_order_goes_to_our_triton_kernel(monkeypatch: pytest.MonkeyPatch, leaves: int, dtype: torch.dtype) -> None:
    x, w, offsets = torch.ones(2, 64).bfloat16(), [torch.ones(8, 64).bfloat16()], torch.tensor([0, 2])
    monkeypatch.setattr(grouped, "TRITON", {"grouped": lambda *given: given})
    assert grouped.grouped(x, w, offsets, leaves, True, dtype) == (x, w, offsets, leaves, True, dtype)
    monkeypatch.setattr(grouped, "TRITON", {})
    with pytest.raises(ValueError, match=f"{leaves} leaves to {dtype}.*ETP 1, cuts.expert_row = 1.*triton-ascend"):
        grouped.grouped(x, w, offsets, leaves, False, dtype)


def test_the_family_has_every_operator_that_the_triton_family_has() -> None:
    """By the vendor or by Triton; nothing is left that a block, or its gradients, would miss on the device."""
    pytest.importorskip("triton")
    folders = [path.parent.name for path in (ROOT / "tio_megatron" / "kernels").glob("*/triton.py")]
    assert len(folders) >= 10
    for folder in folders:
        theirs = importlib.import_module(f"tio_megatron.kernels.{folder}.triton").KERNELS
        ours = importlib.import_module(f"tio_megatron.kernels.{folder}.npu").KERNELS
        assert set(theirs) <= set(ours), folder


def test_no_rows_make_no_call() -> None:
    assert grouped.grouped(torch.ones(0, 64).bfloat16(), [torch.ones(8, 64).bfloat16()], torch.tensor([0, 0]), 1, False, torch.bfloat16).shape == (0, 8)
