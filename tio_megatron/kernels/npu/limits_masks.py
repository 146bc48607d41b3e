"""Which masks and sparse modes torch_npu's documents allow in ``npu_fused_infer_attention_score``. See :mod:`tio_megatron.kernels.npu.limits_inference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.npu.limits import check_kind
from tio_megatron.kernels.npu.limits_training import COMPRESSED
from tio_megatron.kernels.operands import require

ALIGNED = (1, 16, 32)
"""A whole mask may be as wide as the tokens, or as the next multiple of one of these."""
SHAPES = ([COMPRESSED] * 2, [1, COMPRESSED, COMPRESSED], [1, 1, COMPRESSED, COMPRESSED])


def check_mode(what: str, mask: Tensor | None, mode: int, packed: bool) -> None:
    """The sparse mode, with or without a mask, and the mask's type; the compressed mask's shape.

    Raises:
        ValueError: what the documents forbid, and mode 4: its window is not passed here, and the defaults would show every key.
    """
    require(0 <= mode <= 4, what, f"sparse_mode {mode}; 0 to 4")
    band = "sparse_mode 4 (band) needs pre_tokens and next_tokens, which are not passed here and would show every key by default; 3 is causal"
    require(mode != 4, what, band)
    if packed:
        fits = (mode == 0 and mask is None) or (mode == 3 and mask is not None)
        given = "with" if mask is not None else "without"
        require(fits, what, f"sparse_mode {mode} {given} atten_mask in a packed layout; 0 without, or 3 (causal) with")
    require(mode == 0 or mask is not None, what, f"sparse_mode {mode} without atten_mask")
    if mask is None:
        return
    check_kind(what, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8), 2, 3, 4)
    require(mask.is_contiguous(), what, "atten_mask must be contiguous")
    if mode in (2, 3):
        fits = list(mask.shape) in SHAPES
        require(fits, what, f"sparse_mode {mode} takes the compressed mask {' or '.join(map(str, SHAPES))}, got {list(mask.shape)}")


def check_whole(what: str, mask: Tensor, mode: int, batch: int, queries: int, keys: int, *, at_least: bool) -> None:
    """The mask of modes 0 and 1: every query token by every key.

    Args:
        batch, queries, keys: sizes of the call; ``queries`` is the longest sequence's.
        at_least: keys lie in pages, and the mask may be wider than ``keys``, the places that must be there.

    Raises:
        ValueError: another shape than those the documents list.
    """
    # The form of two axes has another meaning for one query token, whose number needs no axis, than for several.
    full = [[batch if queries == 1 else queries, keys], [1, queries, keys], [batch, 1, queries, keys], [1, 1, queries, keys]]
    shape = list(mask.shape)
    more = f" (or {keys} and more)" if at_least else ""
    shown = " or ".join(map(str, full if batch > 1 else full[:3]))
    words = f"sparse_mode {mode} takes the whole mask, {shown}{more} (tokens and keys may be rounded up to 16 or 32), got {shape}"
    require(any(_fits(shape, one, queries, keys, at_least) for one in full), what, words)


def _fits(shape: list[int], wanted: list[int], queries: int, keys: int, at_least: bool) -> bool:
    if len(shape) != len(wanted):
        return False
    wide = shape[-1] >= keys if at_least else shape[-1] in _rounded(keys)
    if len(shape) == 2 and queries == 1:
        return wide and shape[0] == wanted[0]
    return wide and shape[-2] in _rounded(queries) and shape[:-2] == wanted[:-2]


def _rounded(tokens: int) -> list[int]:
    return [-(-tokens // step) * step for step in ALIGNED]


def check_causal(what: str, queries: Sequence[int], keys: Sequence[int]) -> None:
    """Mode 3 aligns the last query token with the last key, so a sequence with fewer keys leaves rows without any.

    Raises:
        ValueError: a sequence with more query tokens than keys.
    """
    for i, (a, b) in enumerate(zip(queries, keys, strict=True)):
        require(a <= b, what, f"sequence {i} has {a} query tokens and {b} keys: sparse_mode 3 would leave rows without a key; as many keys or more")
