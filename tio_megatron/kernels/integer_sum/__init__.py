"""Exact sums over tokens, for gradients: fp32 partials added as 64-bit integers, so that their order is free. Adding ranks' sums is not here.

Which rows make a partial (a *grain*: some positions of one sample) is the caller's; so are the unit, the step's scale and what follows
from ``peak``. Shapes: ``R`` rows, ``G`` grains, ``E`` sums, ``N`` and ``K`` axes of a weight, ``H`` hidden, ``V`` vocabulary rows here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.integer_sum import cpu
from tio_megatron.kernels.integer_sum.form import FIRST_UNIT, LEAST_SPLIT, MOST_SPLIT, UNITS, IntegerSum, split_for, untouched_zeros
from tio_megatron.kernels.operands import FLOATS, check_activations, check_device, check_dtype, check_shape, require

__all__ = ["FIRST_UNIT", "IntegerSum", "add_norm_terms", "add_products", "add_rows", "split_for", "untouched_zeros", "value"]


def add_products(
    sums: IntegerSum | Sequence[IntegerSum], dy: Tensor, x: Tensor, *, starts: Tensor, of: Tensor | None = None, order: Tensor | None = None
) -> None:
    """Add each grain's partial ``dy[rows].T @ x[rows]`` to its sum. The partial has the order of ``linear.matmul(dy.t(), x.t(), leaves=1)``.

    A target is read and written once per about a thousand rows of grains, whatever their size. Grains may come in any order, over
    any number of calls and sums that are added later: the same bytes.

    Args:
        sums: one per expert, or one: ``[N, K]``, rows of any stride.
        dy: ``[R, N]`` fp32 or bf16.
        x: ``[R, K]`` fp32 or bf16.
        starts: ``[G + 1]`` int64, ascending: grain ``g`` has the rows ``starts[g]`` to ``starts[g + 1]``, or none. Rows outside all grains
            count nowhere.
        of: ``[E + 1]`` int64, ascending: sum ``e`` has the grains ``of[e]`` to ``of[e + 1]``. Default, for one sum: all.
        order: int64: the row of ``dy`` and ``x`` at each place that ``starts`` counts. Default: each row at its own place.

    Raises:
        ValueError: shapes, types, devices, ``starts``, ``of`` or ``order`` do not fit; nothing has been added then.
    """
    targets = [sums] if isinstance(sums, IntegerSum) else list(sums)
    check_dtype("add_products", "dy", dy, *FLOATS)  # on an accelerator too: gradients of logits are fp32
    check_activations("add_products", {"x": x})
    require(dy.dim() == 2 and x.dim() == 2 and dy.shape[0] == x.shape[0], "add_products", f"{list(dy.shape)} and {list(x.shape)} are not [R, N] and [R, K]")
    require(bool(targets), "add_products", "at least one sum is needed")
    for name, index in (("starts", starts), ("of", of), ("order", order)):
        if index is not None:
            check_dtype("add_products", name, index, torch.int64)
            check_shape("add_products", name, index, -1)
    require(len(starts) > 0, "add_products", "starts is empty; it holds one number more than there are grains")
    if of is None:
        require(len(targets) == 1, "add_products", f"{len(targets)} sums need `of`, which says whose grains are whose")
        of = torch.tensor([0, len(starts) - 1], dtype=torch.int64, device=starts.device)
    check_shape("add_products", "of", of, len(targets) + 1)
    for one in targets:
        _check_sum("add_products", one, dy.shape[1], x.shape[1])
    cpu.add_products([s.low for s in targets], [s.high for s in targets], [s.peak for s in targets], *_grids(targets), dy, x, starts, of, order)


def add_rows(total: IntegerSum, rows: Tensor, ids: Tensor) -> None:
    """Add each row to the row ``ids[r]`` of the sum, each element a partial: the gradient of an embedding.

    Args:
        total: ``[V, H]``, rows of any stride.
        rows: ``[R, H]`` fp32 or bf16.
        ids: ``[R]`` int64, local row numbers, all in ``[0, V)``.

    Raises:
        ValueError: shapes, types, device or ids do not fit; nothing has been added then.
    """
    check_activations("add_rows", {"rows": rows})
    check_dtype("add_rows", "ids", ids, torch.int64)
    check_shape("add_rows", "ids", ids, -1)
    check_shape("add_rows", "rows", rows, ids.shape[0], -1)
    _check_sum("add_rows", total, -1, rows.shape[1])
    cpu.add_rows(total.low, total.high, total.peak, total.unit, total.split, rows, ids)


def add_norm_terms(total: IntegerSum, dy: Tensor, x: Tensor, eps: float) -> None:
    """Add the terms ``fl(dy * fl(x * inv))`` of an RMSNorm's weight gradient, each a partial; ``inv`` is that of ``rms_norm(x)``.

    Args:
        total: ``[H]``, contiguous.
        dy: ``[..., H]`` fp32 or bf16; leading axes may be strided (heads inside a qkv product).
        x: the same shape and type, the norm's input.
        eps: the norm's.

    Raises:
        ValueError: shapes, types or device do not fit.
    """
    check_activations("add_norm_terms", {"x": x, "dy": dy})
    require(x.dim() >= 1 and x.shape[-1] >= 1, "add_norm_terms", f"x has shape {list(x.shape)}; the last axis must not be empty")
    check_shape("add_norm_terms", "dy", dy, *x.shape)
    _check_sum("add_norm_terms", total, x.shape[-1])
    cpu.add_norm_terms(total.low, total.high, total.peak, total.unit, total.split, dy, x, eps)


def value(low: Tensor, high: Tensor | None, unit: int, split: int, out: Tensor) -> Tensor:
    """``(high * 2^(split - 24) + low) * 2^unit`` with one rounding to fp32 (half to even; a sum of 0 is +0). Returns ``out``.

    Args:
        low: int64, contiguous.
        high: int64, contiguous, as many; None where no partial was large.
        unit: exponent of one count of ``low``.
        split: that of the sum.
        out: fp32, contiguous, as many. May lie over ``low``'s own memory if it begins there or before; that is then overwritten.

    Raises:
        ValueError: types, sizes or device do not fit, or ``out`` overlaps ``low`` or ``high`` elsewhere.
    """
    check_dtype("value", "low", low, torch.int64)
    check_dtype("value", "out", out, torch.float32)
    for name, other in (("out", out), *((("high", high),) if high is not None else ())):
        require(other.numel() == low.numel(), "value", f"{name} has {other.numel()} elements, low {low.numel()}")
        require(other.is_contiguous(), "value", f"{name} must be contiguous")
    require(low.is_contiguous(), "value", "low must be contiguous")
    require(unit in UNITS and LEAST_SPLIT <= split <= MOST_SPLIT, "value", f"unit {unit} and split {split} are not served")
    if high is not None:
        check_dtype("value", "high", high, torch.int64)
        require(not _overlap(out, high), "value", "out lies over high")
    require(not _overlap(out, low) or out.data_ptr() <= low.data_ptr(), "value", "out lies over low, but begins behind it")
    cpu.value(low, high, unit, split, out)
    return out


def _grids(sums: Sequence[IntegerSum]) -> tuple[list[int], list[int]]:
    return [one.unit for one in sums], [one.split for one in sums]


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not (a.is_cpu and b.is_cpu and a.numel() and b.numel()):
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _check_sum(what: str, total: IntegerSum, *shape: int) -> None:
    """Of this shape, on a device that is served, and its last axis contiguous."""
    for name, tensor in (("low", total.low), ("high", total.high), ("peak", total.peak)):
        check_device(what, name, tensor)
        if name != "peak":
            check_shape(what, name, tensor, *shape)
            require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, what, f"{name} has strides {tensor.stride()}; the last axis must be contiguous")
