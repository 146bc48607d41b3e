"""The product on the CPU: calls into ``csrc/product.cpp``, as the operators ``tio::linear_packed`` and ``tio::matmul``."""

from __future__ import annotations

import ctypes

import torch

from tio_megatron.kernels.library import bind, integer, operator, pointer, size, threads, type_code

PANEL = 32
"""Columns of a packed panel (csrc/product.h)."""

_pack = bind("tio_pack", pointer, integer, size, size, size, size, pointer, integer)
_unpack = bind("tio_unpack", pointer, integer, size, size, pointer, size, integer)
_matmul = bind("tio_matmul", pointer, integer, size, size, pointer, integer, size, size, size, size, size, size, pointer, integer, size, integer)
_packed = bind("tio_linear_packed", pointer, integer, size, size, pointer, integer, size, size, size, pointer, size, pointer, integer, size, integer)


def pack_into(packed: torch.Tensor, w: torch.Tensor) -> None:
    """Write ``w[N, K]`` (any strides) into ``packed[panels, K, 32]`` of the same dtype."""
    n, k = w.shape
    _pack(w.data_ptr(), type_code(w, "weight"), *w.stride(), n, k, packed.data_ptr(), threads())


def unpack_from(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of :func:`pack_into`: ``[N, K]``."""
    w = torch.empty(n, packed.shape[1], dtype=packed.dtype)
    _unpack(packed.data_ptr(), type_code(packed, "weight"), n, packed.shape[1], w.data_ptr(), w.stride(0), threads())
    return w


def empty_packed(n: int, k: int, dtype: torch.dtype, *leading: int) -> torch.Tensor:
    """Memory for ``[..., panels, K, 32]``."""
    return torch.empty(*leading, -(-n // PANEL), k, PANEL, dtype=dtype)


class PackedWeight:
    """One copy of a weight ``[N, K]``, in the layout the product reads. Explicit: nobody refreshes it but :meth:`update_`."""

    def __init__(self, packed: torch.Tensor, n: int) -> None:
        self.packed = packed
        self.shape = torch.Size((n, packed.shape[1]))

    @classmethod
    def from_weight(cls, w: torch.Tensor) -> PackedWeight:
        """Pack ``w[N, K]``, fp32 or bf16.

        Raises:
            ValueError: not a matrix, or another dtype.
        """
        if w.dim() != 2:
            raise ValueError(f"weight: shape {tuple(w.shape)} is not [N, K]")
        type_code(w, "weight")
        self = cls(empty_packed(*w.shape, w.dtype), w.shape[0])
        pack_into(self.packed, w.detach())
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Element type, fp32 or bf16."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy (``N`` rounded up to 32)."""
        return self.packed.nbytes

    def update_(self, w: torch.Tensor) -> PackedWeight:
        """Replace the values in place, in the same memory.

        Raises:
            ValueError: another shape or dtype.
        """
        if w.shape != self.shape or w.dtype != self.dtype:
            raise ValueError(f"packed weight: {tuple(self.shape)} {self.dtype} cannot take {tuple(w.shape)} {w.dtype}")
        pack_into(self.packed, w.detach())
        return self

    def unpack(self) -> torch.Tensor:
        """The weight ``[N, K]`` again (for digests and checkpoints)."""
        return unpack_from(self.packed, self.shape[0])


def _linear_packed_cpu(x: torch.Tensor, packed: torch.Tensor, n: int, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    rows, k = x.shape
    y = torch.empty(rows, n, dtype=out_dtype)
    if rows and n:
        offsets = (ctypes.c_int64 * 2)(0, rows)
        code = type_code(packed, "linear")
        _packed(x.data_ptr(), type_code(x, "linear"), *x.stride(), packed.data_ptr(), code, 1, n, k, offsets, leaves, y.data_ptr(), type_code(y, "linear"), n, threads())
    return y


def _matmul_cpu(a: torch.Tensor, b: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[0]
    if not k:
        return torch.zeros(m, n, dtype=out_dtype)
    c = torch.empty(m, n, dtype=out_dtype)
    if m and n:
        code = type_code(b, "matmul")
        _matmul(a.data_ptr(), type_code(a, "matmul"), *a.stride(), b.data_ptr(), code, *b.stride(), m, n, k, leaves, c.data_ptr(), type_code(c, "matmul"), n, threads())
    return c


linear_packed = operator(
    "linear_packed(Tensor x, Tensor packed, int n, int leaves, ScalarType out_dtype) -> Tensor",
    _linear_packed_cpu,
    fake=lambda x, packed, n, leaves, out_dtype: x.new_empty(x.shape[0], n, dtype=out_dtype),
)
matmul_strided = operator(
    "matmul(Tensor a, Tensor b, int leaves, ScalarType out_dtype) -> Tensor",
    _matmul_cpu,
    fake=lambda a, b, leaves, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype),
)
