"""Uninitialised buffers made harmful, so that a read of an element nobody wrote shows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"))


@contextmanager
def poison() -> Iterator[None]:
    """In this context torch's empty buffers hold NaN (integers: their smallest value, booleans: True).

    Replaces the names ``torch.empty``, ``empty_like``, ``empty_strided``, ``Tensor.new_empty`` and ``new_empty_strided`` in this
    process, in every thread; it sees no allocation made inside torch's own C++ code, and no name taken by ``from torch import empty``.

    >>> with poison():
    ...     torch.empty(2)
    tensor([nan, nan])
    """
    saved = [(owner, name, getattr(owner, name)) for owner, name in _NAMES]
    try:
        for owner, name, function in saved:
            setattr(owner, name, _filled(function))
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def _filled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        if out.is_meta:
            return out
        with torch.no_grad():
            if out.is_floating_point() or out.is_complex():
                out.fill_(float("nan"))
            elif out.dtype == torch.bool:
                out.fill_(True)
            else:
                out.fill_(torch.iinfo(out.dtype).min)
        return out

    return wrapped
