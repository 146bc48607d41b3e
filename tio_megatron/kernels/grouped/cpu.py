"""The grouped product on the CPU, as the operator ``tio::grouped_packed``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tio_megatron.kernels.library import operator, threads, type_code
from tio_megatron.kernels.linear.cpu import _packed, empty_packed, pack_into, unpack_from


class PackedExperts:
    """One copy of the weights ``[E, N, K]`` of all local experts, in the layout the product reads. Only :meth:`update_` refreshes it."""

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
        if first.dim() != 2:
            raise ValueError(f"experts: shape {tuple(first.shape)} of one expert is not [N, K]")
        type_code(first, "experts")
        self = cls(empty_packed(*first.shape, first.dtype, len(weights)), first.shape[0])
        return self.update_(weights)

    @property
    def dtype(self) -> torch.dtype:
        """Element type, fp32 or bf16."""
        return self.packed.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed copy (``N`` rounded up to 32)."""
        return self.packed.nbytes

    def update_(self, weights: Sequence[torch.Tensor] | torch.Tensor | torch.Tensor, expert: int | None = None) -> PackedExperts:
        """Replace the values in place: all experts, or ``expert`` alone by one ``[N, K]``.

        Raises:
            ValueError: another number of experts, shape or dtype.
        """
        given = [weights] if expert is not None else weights
        if expert is None and len(given) != self.shape[0]:
            raise ValueError(f"packed experts: {self.shape[0]} experts cannot take {len(given)}")
        for i, w in enumerate(given):
            if w.shape != self.shape[1:] or w.dtype != self.dtype:
                raise ValueError(f"packed experts: {tuple(self.shape[1:])} {self.dtype} cannot take {tuple(w.shape)} {w.dtype}")
            pack_into(self.packed[i if expert is None else expert], w.detach())
        return self

    def unpack(self) -> torch.Tensor:
        """The weights ``[E, N, K]`` again (for digests and checkpoints)."""
        return torch.stack([unpack_from(one, self.shape[1]) for one in self.packed])


def _grouped_packed_cpu(x: torch.Tensor, packed: torch.Tensor, n: int, offsets: torch.Tensor, leaves: int, out_dtype: torch.dtype) -> torch.Tensor:
    rows, k = x.shape
    y = torch.empty(rows, n, dtype=out_dtype)
    if rows and n:
        types = type_code(x, "grouped"), type_code(packed, "grouped"), type_code(y, "grouped")
        _packed(x.data_ptr(), types[0], *x.stride(), packed.data_ptr(), types[1], packed.shape[0], n, k, offsets.data_ptr(), leaves, y.data_ptr(), types[2], n, threads())
    return y


grouped_packed = operator(
    "grouped_packed(Tensor x, Tensor packed, int n, Tensor offsets, int leaves, ScalarType out_dtype) -> Tensor",
    _grouped_packed_cpu,
    fake=lambda x, packed, n, offsets, leaves, out_dtype: x.new_empty(x.shape[0], n, dtype=out_dtype),
)
