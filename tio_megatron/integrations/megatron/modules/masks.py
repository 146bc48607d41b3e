"""Which attention masks a causal attention may silently stand for. Looks at masks only; no arithmetic."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_accepted = WeakIdKeyDictionary()
"""Masks already looked at, with their version: every layer is given the same one."""


def require_causal(mask: torch.Tensor | None, length: int, context_ranks: int = 1) -> None:
    """Refuse a mask (True hides) that hides anything but later tokens and padding on the right.

    Rows of padding may be anything: nothing reads what they compute.

    Args:
        mask: ``None`` (causal) or ``[batch or 1, 1, length, length]`` bool.
        length: tokens of a sequence.
        context_ranks: size of the context-parallel group. A mask is refused where a rank holds only part of the tokens.

    Raises:
        ValueError: another shape or dtype, the first entry that a causal mask would not have, or any mask under context parallelism.

    >>> hidden = torch.ones(3, 3).triu(1).bool()[None, None]
    >>> require_causal(hidden, 3)
    >>> require_causal(hidden & False, 3)
    Traceback (most recent call last):
    ...
    ValueError: attention: the mask shows token 1 to token 0 (sample 0), which a causal mask hides; only causal masks with padding on the right are supported
    """
    if mask is not None and context_ranks > 1:
        raise ValueError(f"attention: a mask {tuple(mask.shape)} under context parallelism is not supported; pass None, which is causal")
    if mask is None or _accepted.get(mask) == mask._version:
        return
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, length, length):
        raise ValueError(f"attention: a mask of {mask.dtype} {tuple(mask.shape)} is not supported; pass None or bool [batch, 1, {length}, {length}]")
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    for sample, hidden in enumerate(mask[:, 0]):
        padding = int(hidden.all(0).flip(0).long().cumprod(0).sum())
        wrong = ((hidden != causal)[: length - padding]).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            shows = not hidden[row, column]
            raise ValueError(
                f"attention: the mask {'shows' if shows else 'hides'} token {column} {'to' if shows else 'from'} token {row} (sample {sample}), "
                f"which a causal mask {'hides' if shows else 'shows'}; only causal masks with padding on the right are supported"
            )
    _accepted[mask] = mask._version
