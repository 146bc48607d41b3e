"""Equality of bytes, and the place of the first difference.

``torch.equal`` takes 0.0 and -0.0 for equal and two NaNs for different; here the bytes decide, except that any NaN equals any other
NaN at the same place (processors make different payloads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """Where two values first differ. ``path`` leads into nested containers; ``index`` is the coordinate in the tensor, or None."""

    path: str
    index: tuple[int, ...] | None
    what: str
    count: int = 1
    total: int = 1

    def __str__(self) -> str:
        where = self.path + (str(list(self.index)) if self.index is not None else "")
        many = f" ({self.count} of {self.total} elements differ)" if self.index is not None else ""
        return f"{where or 'value'}: {self.what}{many}"


def first_mismatch(a: Any, b: Any, path: str = "") -> Mismatch | None:
    """The first place where ``a`` and ``b`` differ, or None.

    Tensors (any device; type, shape and bytes are compared), numbers, strings and None, and mappings and sequences of them.

    >>> print(first_mismatch(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])))
    [1]: 00000000 (0.0) against 80000000 (-0.0) (1 of 2 elements differ)
    >>> first_mismatch(torch.tensor([float("nan")]), torch.tensor([float("nan")])) is None
    True
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors(a.detach().cpu(), b.detach().cpu(), path)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return Mismatch(path, None, f"other keys: {sorted(map(str, a.keys() ^ b.keys()))} are on one side only")
        return next((found for key in a if (found := first_mismatch(a[key], b[key], f"{path}[{key!r}]"))), None)
    if _is_sequence(a) and _is_sequence(b):
        if len(a) != len(b):
            return Mismatch(path, None, f"{len(a)} items against {len(b)}")
        return next((found for i in range(len(a)) if (found := first_mismatch(a[i], b[i], f"{path}[{i}]"))), None)
    if isinstance(a, float) and isinstance(b, float):
        return _tensors(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), path)
    if type(a) is not type(b) or a != b:
        return Mismatch(path, None, f"{a!r} against {b!r}")
    return None


def assert_same_bytes(a: Any, b: Any, what: str = "") -> None:
    """Fail unless ``a`` and ``b`` have the same types, shapes and bytes (NaN positions count, NaN payloads do not).

    Raises:
        AssertionError: names ``what``, the coordinate, the bytes and both values of the first mismatch.
    """
    found = first_mismatch(a, b)
    if found:
        raise AssertionError(f"{what}: {found}" if what else str(found))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(_BITS[t.element_size()])


def _tensors(a: torch.Tensor, b: torch.Tensor, path: str) -> Mismatch | None:
    if a.dtype != b.dtype:
        return Mismatch(path, None, f"{a.dtype} against {b.dtype}")
    if a.shape != b.shape:
        return Mismatch(path, None, f"shape {tuple(a.shape)} against {tuple(b.shape)}")
    if a.is_complex():
        return _tensors(torch.view_as_real(a), torch.view_as_real(b), path)
    differ = _bits(a) != _bits(b)
    if a.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    count = int(differ.sum())
    if not count:
        return None
    flat = int(differ.reshape(-1).to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)) if a.dim() else ()
    return Mismatch(path, index, f"{_show(a[index])} against {_show(b[index])}", count, differ.numel())


def _show(element: torch.Tensor) -> str:
    """Most significant byte first, then the value."""
    raw = bytes(_bits(element).reshape(1).view(torch.uint8).tolist())
    return f"{raw[::-1].hex()} ({element.item()!r})"
