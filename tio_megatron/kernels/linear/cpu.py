"""The product on the CPU: calls into ``csrc/product.cpp``, as the operators ``tio::linear_packed`` and ``tio::matmul``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tio_megatron.kernels import families
from tio_megatron.kernels.library import TYPES, bind, integer, operator, pointer, size, threads, type_code

PANEL = 32
"""Columns of a packed panel (csrc/product.h)."""

_activation = (pointer, integer, size, size)
_weights = (pointer, integer, integer, size, size, size)
_output = (pointer, integer, size)
_product = bind("tio_product", *_activation, *_weights, pointer, size, size, size, integer, *_output, integer)
_pack = bind("tio_pack", pointer, integer, size, size, size, size, pointer, integer)
_unpack = bind("tio_unpack", pointer, integer, size, size, pointer, size, integer)
_advise = bind("tio_advise", pointer, size)
_PACKED_STRIDES = (0, 0)


def product(
    a: torch.Tensor,
    weights: Sequence[int],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None,
    n: int,
    offsets: Sequence[int],
    leaves: int,
    paired: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Rows ``offsets[e]`` to ``offsets[e + 1]`` of ``a[R, K]`` times the weight ``[N, K]`` at address ``weights[e]``: ``[R, N]``.

    ``strides`` are those of every weight, None for packed ones. Arguments are checked by the public functions.
    """
    rows, k = a.shape
    if not k:
        return torch.zeros(rows, n, dtype=out_dtype)
    y = torch.empty(rows, n, dtype=out_dtype)
    if rows and n:
        count = len(weights)
        left = (a.data_ptr(), TYPES[a.dtype], *a.stride())
        right = ((pointer * count)(*weights), TYPES[dtype], strides is None, *(strides or _PACKED_STRIDES), count)
        _product(*left, *right, (ctypes.c_int64 * (count + 1))(*offsets), n, k, leaves, paired, y.data_ptr(), TYPES[out_dtype], n, threads())
    return y


def pack_into(packed: torch.Tensor, w: torch.Tensor) -> None:
    """Write ``w[N, K]`` (any strides) into ``packed[panels, K, 32]`` of the same dtype; on an accelerator it is ``[N, K]`` too."""
    if not packed.is_cpu:
        packed.copy_(w)
        return
    n, k = w.shape
    _pack(w.data_ptr(), type_code(w, "weight"), *w.stride(), n, k, packed.data_ptr(), threads())


def unpack_from(packed: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack_into`, into ``w[N, K]``.

    Raises:
        ValueError: ``w`` has another shape or dtype, or its terms are not contiguous.
    """
    n, k = w.shape
    if not packed.is_cpu and w.shape == packed.shape and w.dtype == packed.dtype:
        return w.copy_(packed)
    if not packed.is_cpu or k != packed.shape[1] or -(-n // PANEL) != packed.shape[0] or w.dtype != packed.dtype or w.stride(1) != 1:
        raise ValueError(f"packed weight: {w.dtype} {tuple(w.shape)} with strides {w.stride()} cannot take panels {tuple(packed.shape)} of {packed.dtype}")
    _unpack(packed.data_ptr(), type_code(packed, "weight"), n, k, w.data_ptr(), w.stride(0), threads())
    return w


def empty_packed(n: int, k: int, like: torch.Tensor, *leading: int) -> torch.Tensor:
    """Memory for ``[..., panels, K, 32]`` of the type of ``like``; on its device, if that is an accelerator, ``[..., N, K]``."""
    if not like.is_cpu:
        return like.new_empty(*leading, n, k)
    packed = torch.empty(*leading, -(-n // PANEL), k, PANEL, dtype=like.dtype)
    _advise(packed.data_ptr(), packed.nbytes)
    return packed


class PackedWeight:
    """One copy of a weight ``[N, K]`` in the layout the product reads front to back: for weights used many times, with few rows.

    Explicit, so never stale behind your back: the values change only through :meth:`update_`. On an accelerator, whose kernels read weights
    as they are, it is a plain copy.
    """

    def __init__(self, packed: torch.Tensor, n: int) -> None:
        self.packed = packed
        self.shape = torch.Size((n, packed.shape[1]))

    @classmethod
    def from_weight(cls, w: torch.Tensor) -> PackedWeight:
        """Pack ``w[N, K]``, fp32 or bf16.

        Raises:
            ValueError: not a matrix, or another dtype or device.
        """
        if w.dim() != 2 or not (w.is_cpu or families.serves("linear_packed", w.device.type)):
            works = " or ".join(families.devices("linear_packed"))
            raise ValueError(f"weight: {tuple(w.shape)} on {w.device} is not [N, K] on {works}")
        type_code(w, "weight")
        self = cls(empty_packed(w.shape[0], w.shape[1], w), w.shape[0])
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

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows ``numbers[...]`` int64 of the weight, ``[..., K]``, bit for bit: one packed copy serves a head and its embedding.

        A cache line is read for each element: 3 to 6 microseconds a row of 1024, where a product with the row costs 60.
        """
        if not self.packed.is_cpu:
            return self.packed[numbers]
        column = numbers % PANEL
        if self.dtype == torch.bfloat16:
            # A word of a panel holds columns j and j + 16 (csrc/pack_body.h, place).
            column = torch.where(column < 16, 2 * column, 2 * column - 31)
        return self.packed[numbers // PANEL, :, column]

    def unpack(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weight ``[N, K]`` again, bit for bit (for digests, checkpoints and partial updates); written to ``out`` where given.

        Raises:
            ValueError: ``out`` does not fit.
        """
        return unpack_from(self.packed, self.packed.new_empty(self.shape) if out is None else out)


def _linear_packed_cpu(x: torch.Tensor, packed: torch.Tensor, n: int, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    return product(x, (packed.data_ptr(),), packed.dtype, None, n, (0, x.shape[0]), leaves, False, out_dtype)


def _matmul_cpu(a: torch.Tensor, b: torch.Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> torch.Tensor:
    return product(a, (b.data_ptr(),), b.dtype, b.stride(), b.shape[0], (0, a.shape[0]), leaves, paired, out_dtype)


linear_packed = operator(
    "linear_packed(Tensor x, Tensor packed, int n, int leaves, ScalarType out_dtype) -> Tensor",
    _linear_packed_cpu,
    fake=lambda x, packed, n, leaves, out_dtype: x.new_empty(x.shape[0], n, dtype=out_dtype),
)
matmul_strided = operator(
    "matmul(Tensor a, Tensor b, int leaves, bool paired, ScalarType out_dtype) -> Tensor",
    _matmul_cpu,
    fake=lambda a, b, leaves, paired, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype),
)
