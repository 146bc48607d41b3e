"""Sequence lengths as the operators take them: numbers on the host. They are made once a step, not once a layer.

A tensor on the device would have to be waited for in every layer. So lengths come in host tensors (every engine has them there), and what was made
of one tensor is kept until that tensor is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lengths:
    """Sequences laid end to end. ``ends`` cumulative, without a leading 0; ``counts`` of each sequence."""

    ends: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def from_starts(cls, starts: Sequence[int]) -> Lengths:
        """From ``[0, ..., total]``.

        >>> Lengths.from_starts([0, 3, 4])
        Lengths(ends=(3, 4), counts=(3, 1))
        """
        return cls(tuple(starts[1:]), tuple(b - a for a, b in zip(starts[:-1], starts[1:], strict=True)))


def lengths_of(ends: Sequence[int]) -> list[int]:
    """The length of each sequence from cumulative ends.

    >>> lengths_of([3, 4])
    [3, 1]
    """
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


_kept: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def numbers(what: str, name: str, tensor: Tensor) -> tuple[int, ...]:
    """The entries of a host tensor. Read once: the same tensor gives what was read, until it is changed or gone.

    Raises:
        ValueError: the tensor is on a device, or holds nothing to read.
    """
    if tensor.device.type != "cpu":
        wanted = "in vLLM query_start_loc_cpu and seq_lens_cpu, in Megatron cu_seqlens moved once a step"
        raise ValueError(f"{what}: {name} is on {tensor.device}; every layer would wait for the device. Pass the host's copy ({wanted})")
    if tensor.is_inference():
        return tuple(tensor.tolist())  # such a tensor counts no changes, so nothing can be kept of it; a host tensor costs microseconds
    key = id(tensor)
    found = _kept.get(key)
    if found is not None and found[0]() is tensor and found[1] == tensor._version:
        return found[2]
    read = tuple(tensor.tolist())
    _kept[key] = (weakref.ref(tensor, lambda _: _kept.pop(key, None)), tensor._version, read)
    return read


def starts(what: str, name: str, tensor: Tensor, tokens: int) -> Lengths:
    """Lengths from cumulative starts ``[0, ..., tokens]``, int32. Sequences without a token stay.

    Raises:
        ValueError: not one axis of int32, or it does not ascend from 0 to ``tokens``.
    """
    if tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError(f"{what}: {name} is {tensor.dtype} of shape {list(tensor.shape)}; int32 [sequences + 1] is expected")
    read = numbers(what, name, tensor)
    if len(read) < 2 or read[0] != 0 or read[-1] != tokens or list(read) != sorted(read):
        raise ValueError(f"{what}: {name} must ascend from 0 to the {tokens} tokens, got {list(read)[:8]}")
    return Lengths.from_starts(read)


_copies: dict[int, tuple[weakref.ref[Tensor], int, torch.device, Tensor]] = {}


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor's copy on the device, made once: the same tensor gives the same copy until it is changed or gone."""
    if tensor.device == device:
        return tensor
    if tensor.is_inference():
        return tensor.to(device, non_blocking=True)
    key = id(tensor)
    found = _copies.get(key)
    if found is not None and found[0]() is tensor and found[1] == tensor._version and found[2] == device:
        return found[3]
    copy = tensor.to(device, non_blocking=True)
    _copies[key] = (weakref.ref(tensor, lambda _: _copies.pop(key, None)), tensor._version, device, copy)
    return copy
