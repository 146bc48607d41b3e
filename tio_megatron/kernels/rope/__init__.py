"""Rotary embedding over halves (the NeoX form), and its tables: one table serves trainer and rollout. Interleaved forms are not here."""

from __future__ import annotations

import torch
from torch import Tensor

from tio_megatron.kernels.operands import check_activations, check_dtype, check_shape, require
from tio_megatron.kernels.rope import cpu
from tio_megatron.kernels.rope.table import rope_table

__all__ = ["rope", "rope_backward", "rope_table"]


def _check(what: str, x: Tensor, positions: Tensor, table: Tensor) -> None:
    check_activations(what, {"x": x})
    require(x.dim() == 3, what, f"x has shape {list(x.shape)}; expected [tokens, heads, D]")
    check_dtype(what, "positions", positions, torch.int64)
    check_shape(what, "positions", positions, x.shape[0])
    check_dtype(what, "table", table, torch.float32)
    require(table.dim() == 2, what, f"table has shape {list(table.shape)}; expected [positions, dim] from rope_table")
    require(
        table.shape[1] % 2 == 0 and 2 <= table.shape[1] <= x.shape[2],
        what,
        f"the table rotates {table.shape[1]} of {x.shape[2]} elements; it must be even and fit",
    )


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate ``x[T, heads, D]`` to its positions: fp32 inside, one rounding. Differentiable.

    Args:
        x: fp32 or bf16; tokens and heads may be strided.
        positions: ``[T]`` int64, each a row of the table.
        table: ``[P, R]`` fp32 from :func:`rope_table`; with R < D the elements from R on are kept.

    Returns:
        ``[T, heads, D]`` contiguous.

    Raises:
        ValueError: shapes, types or device do not fit, or a position is outside the table.
    """
    _check("rope", x, positions, table)
    return cpu.rope(x, positions, table, False)


def rope_backward(dy: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The gradient of :func:`rope`: the rotation back."""
    _check("rope_backward", dy, positions, table)
    return cpu.rope(dy, positions, table, True)
