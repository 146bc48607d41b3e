"""Digests of whole (unsharded) tensors: what trainer and rollout compare after weights were moved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

ROW_BYTES = 16
"""Bytes kept of the digest of one row of log-probabilities."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """64 hex digits over dtype, shape and bytes; the name is not part of it, so engines may name the tensor as they like.

    >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(2, 1))
    False
    """
    header = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode()
    hashed = hashlib.sha256(header)
    hashed.update(_bytes(tensor))
    return hashed.hexdigest()


def manifest_digest(digests: Mapping[str, str]) -> str:
    """16 hex digits over a manifest (HF name -> :func:`tensor_digest`), whatever its order."""
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def digest_differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """One line for each name whose digest differs or that one side lacks; empty when the manifests agree."""
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a != b:
            lines.append(f"{name}: {a[:16] if a else 'missing'} / {b[:16] if b else 'missing'}")
    return lines


def row_digests(rows: torch.Tensor) -> list[bytes]:
    """16 bytes for each row of ``rows`` [N, V] fp32: a vocabulary of log-probabilities too large to keep.

    Where a row has NaN counts, which NaN does not: processors make different ones.

    Raises:
        ValueError: not a two-dimensional fp32 tensor.
    """
    if rows.dim() != 2 or rows.dtype != torch.float32:
        raise ValueError(f"row digests need fp32 [N, V], got {rows.dtype} {list(rows.shape)}")
    rows = rows.detach().cpu().contiguous()
    nan = rows.isnan()
    if nan.any():
        rows = rows.masked_fill(nan, float("nan"))
    return [hashlib.sha256(_bytes(row)).digest()[:ROW_BYTES] for row in rows]


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The manifest of a stream of named tensors; holds one tensor at a time."""
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
