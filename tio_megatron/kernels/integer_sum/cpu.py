"""Exact sums over tokens on the CPU (``csrc/integer_products.cpp``, ``csrc/integer_sum.cpp``), as ``tio::add_products``, ``add_rows``, ``add_norm_terms``
and ``sum_value``. All of them write into tensors they are given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from tio_megatron.kernels.library import bind, integer, operator, pointer, real, size, threads, type_code
from tio_megatron.kernels.operands import dense_last, rows_of

_operand = (pointer, integer, size)
_add_products = bind(
    "tio_add_products",
    *(*_operand, *_operand, size, size, size),
    *(pointer, size, pointer, size, pointer),
    *(size, pointer, pointer, pointer, pointer, pointer, pointer, pointer, integer),
)
_add_rows = bind("tio_add_rows", *_operand, pointer, size, size, size, size, size, pointer, size, pointer, size, pointer, integer)
_add_norm_terms = bind("tio_add_norm_terms", pointer, pointer, pointer, pointer, integer, size, size, real, size, size, pointer, pointer, pointer, integer)
_value = bind("tio_sum_value", pointer, pointer, size, size, size, pointer, integer)

_REFUSED = {2: "starts must ascend, from 0 at least to the number of rows at most", 3: "of must ascend, from 0 at least to the number of grains at most"}


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (pointer * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _add_products_cpu(
    low: Sequence[Tensor],
    high: Sequence[Tensor],
    peak: Sequence[Tensor],
    unit: Sequence[int],
    split: Sequence[int],
    dy: Tensor,
    x: Tensor,
    starts: Tensor,
    of: Tensor,
    order: Tensor | None,
) -> None:
    dy, x, starts, of = dense_last(dy), dense_last(x), starts.contiguous(), of.contiguous()
    order = None if order is None else order.contiguous()
    code = _add_products(
        *(dy.data_ptr(), type_code(dy, "dy"), dy.stride(0), x.data_ptr(), type_code(x, "x"), x.stride(0), dy.shape[0], dy.shape[1], x.shape[1]),
        *(None if order is None else order.data_ptr(), 0 if order is None else len(order), starts.data_ptr(), len(starts) - 1, of.data_ptr()),
        *(len(low), _addresses(low), _longs([t.stride(0) for t in low]), _addresses(high), _longs([t.stride(0) for t in high])),
        *(_addresses(peak), _longs(unit), _longs(split), threads()),
    )
    if code:
        raise ValueError(f"add_products: {_REFUSED.get(code, f'order must hold row numbers below {dy.shape[0]}')}")


def _add_rows_cpu(low: Tensor, high: Tensor, peak: Tensor, unit: int, split: int, rows: Tensor, ids: Tensor) -> None:
    rows, ids = dense_last(rows), ids.contiguous()
    code = _add_rows(
        *(rows.data_ptr(), type_code(rows, "rows"), rows.stride(0), ids.data_ptr(), *rows.shape[:1], *low.shape),
        *(unit, split, low.data_ptr(), low.stride(0), high.data_ptr(), high.stride(0), peak.data_ptr(), threads()),
    )
    if code:
        raise ValueError(f"add_rows: ids must be local row numbers, 0 to {low.shape[0] - 1}")


def _add_norm_terms_cpu(low: Tensor, high: Tensor, peak: Tensor, unit: int, split: int, dy: Tensor, x: Tensor, eps: float) -> None:
    dy, _, dy_layout = rows_of(dy)
    x, count, layout = rows_of(x)
    _add_norm_terms(
        *(dy.data_ptr(), dy_layout, x.data_ptr(), layout, type_code(x, "x"), count, x.shape[-1], eps),
        *(unit, split, low.data_ptr(), high.data_ptr(), peak.data_ptr(), threads()),
    )


def _value_cpu(low: Tensor, high: Tensor | None, unit: int, split: int, out: Tensor) -> None:
    _value(low.data_ptr(), None if high is None else high.data_ptr(), low.numel(), unit, split, out.data_ptr(), threads())


def _nothing(*args: object) -> None:
    """The shape function of what only writes."""


add_products = operator(
    "add_products(Tensor(a!)[] low, Tensor(b!)[] high, Tensor(c!)[] peak, int[] unit, int[] split, "
    "Tensor dy, Tensor x, Tensor starts, Tensor of, Tensor? order) -> ()",
    _add_products_cpu,
    fake=_nothing,
)
add_rows = operator(
    "add_rows(Tensor(a!) low, Tensor(b!) high, Tensor(c!) peak, int unit, int split, Tensor rows, Tensor ids) -> ()", _add_rows_cpu, fake=_nothing
)
add_norm_terms = operator(
    "add_norm_terms(Tensor(a!) low, Tensor(b!) high, Tensor(c!) peak, int unit, int split, Tensor dy, Tensor x, float eps) -> ()",
    _add_norm_terms_cpu,
    fake=_nothing,
)
value = operator("sum_value(Tensor low, Tensor? high, int unit, int split, Tensor(a!) out) -> ()", _value_cpu, fake=_nothing, names=("value",))
