"""The grouped products on the CPU, as the operators ``tio::grouped_packed``, ``tio::grouped`` and ``tio::grouped_wgrad``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tio_megatron.kernels import families
from tio_megatron.kernels.library import TYPES, bind, integer, operator, pointer, size, threads, type_code
from tio_megatron.kernels.linear.cpu import empty_packed, pack_into, product, unpack_from

_wgrad = bind("tio_grouped_wgrad", pointer, integer, size, pointer, integer, size, size, pointer, size, size, pointer, integer)


class PackedExperts:
    """One copy of the weights ``[E, N, K]`` of all local experts, in the layout the product reads. Only :meth:`update_` changes it."""

    def __init__(self, packed: torch.Tensor, n: int) -> None:
        self.packed = packed
        self.shape = torch.Size((packed.shape[0], n, packed.shape[2]))

    @classmethod
    def from_weights(cls, weights: Sequence[torch.Tensor] | torch.Tensor) -> PackedExperts:
        """Pack ``[E, N, K]`` or one ``[N, K]`` per expert, fp32 or bf16.

        Raises:
            ValueError: no expert, shapes or dtypes that differ, or an unsupported dtype.
        """
        if not len(weights):
            raise ValueError("experts: at least one weight is needed")
        first = weights[0]
        if first.dim() != 2 or not (first.is_cpu or families.serves("grouped_packed", first.device.type)):
            works = " or ".join(families.devices("grouped_packed"))
            raise ValueError(f"experts: {tuple(first.shape)} on {first.device} is not one expert's [N, K] on {works}")
        type_code(first, "experts")
        self = cls(empty_packed(first.shape[0], first.shape[1], first, len(weights)), first.shape[0])
        return self.update_(weights)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, fp32 or bf16."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy (``N`` rounded up to 32)."""
        return self.packed.nbytes

    def update_(self, weights: Sequence[torch.Tensor] | torch.Tensor, expert: int | None = None) -> PackedExperts:
        """Replace the values in place: of all experts, or with ``expert`` of that one by a single ``[N, K]``.

        Raises:
            ValueError: another number of experts, shape or dtype. Nothing has changed then.
        """
        first = 0 if expert is None else expert
        given = [weights] if expert is not None and isinstance(weights, torch.Tensor) else list(weights)
        if expert is None and len(given) != self.shape[0] or not 0 <= first < self.shape[0]:
            raise ValueError(f"packed experts: {self.shape[0]} experts cannot take {len(given)} at {first}")
        for w in given:
            if w.shape != self.shape[1:] or w.dtype != self.dtype:
                raise ValueError(f"packed experts: {tuple(self.shape[1:])} {self.dtype} cannot take {tuple(w.shape)} {w.dtype}")
        for i, w in enumerate(given, first):
            pack_into(self.packed[i], w.detach())
        return self

    def unpack(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The weights ``[E, N, K]`` again, bit for bit (for digests, checkpoints and partial updates); written to ``out`` where given.

        Raises:
            ValueError: ``out`` does not fit.
        """
        out = self.packed.new_empty(self.shape) if out is None else out
        if out.shape != self.shape:
            raise ValueError(f"packed experts: {tuple(out.shape)} cannot take {tuple(self.shape)}")
        for packed, w in zip(self.packed, out, strict=True):
            unpack_from(packed, w)
        return out


def _grouped_packed_cpu(x: torch.Tensor, packed: torch.Tensor, n: int, offsets: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    first, stride = packed.data_ptr(), packed.stride(0) * packed.element_size()
    weights = range(first, first + stride * packed.shape[0], stride)
    return product(x, weights, packed.dtype, None, n, _bounds(offsets, x), leaves, False, out_dtype)


def _grouped_cpu(x: torch.Tensor, w: list[torch.Tensor], offsets: torch.Tensor, leaves: int, paired: bool, out_dtype: torch.dtype) -> torch.Tensor:
    strides = w[0].stride()
    if any(one.stride() != strides for one in w):
        w = [one.contiguous() for one in w]
        strides = w[0].stride()
    weights = [one.data_ptr() for one in w]
    return product(x, weights, w[0].dtype, strides, w[0].shape[0], _bounds(offsets, x), leaves, paired, out_dtype)


def _grouped_wgrad_cpu(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    bounds = _bounds(offsets, x)
    dy, x = dy.contiguous(), x.contiguous()
    experts, n, k = len(bounds) - 1, dy.shape[1], x.shape[1]
    dw = torch.empty(experts, n, k, dtype=torch.float32)
    if n and k:
        left, right = (dy.data_ptr(), TYPES[dy.dtype], n), (x.data_ptr(), TYPES[x.dtype], k)
        _wgrad(*left, *right, experts, (ctypes.c_int64 * (experts + 1))(*bounds), n, k, dw.data_ptr(), threads())
    return dw


def _bounds(offsets: torch.Tensor, x: torch.Tensor) -> list[int]:
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != x.shape[0] or bounds != sorted(bounds):
        raise ValueError(f"grouped product: offsets must ascend from 0 to the number of rows, {x.shape[0]}; got {bounds}")
    return bounds


grouped_packed = operator(
    "grouped_packed(Tensor x, Tensor packed, int n, Tensor offsets, int leaves, ScalarType out_dtype) -> Tensor",
    _grouped_packed_cpu,
    fake=lambda x, packed, n, offsets, leaves, out_dtype: x.new_empty(x.shape[0], n, dtype=out_dtype),
)
grouped_strided = operator(
    "grouped(Tensor x, Tensor[] w, Tensor offsets, int leaves, bool paired, ScalarType out_dtype) -> Tensor",
    _grouped_cpu,
    fake=lambda x, w, offsets, leaves, paired, out_dtype: x.new_empty(x.shape[0], w[0].shape[0], dtype=out_dtype),
)
grouped_wgrad_rows = operator(
    "grouped_wgrad(Tensor dy, Tensor x, Tensor offsets) -> Tensor",
    _grouped_wgrad_cpu,
    fake=lambda dy, x, offsets: x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=torch.float32),
)
