"""What torch_npu's documents forbid in ``npu_fusion_attention``. See :mod:`tio_megatron.kernels.npu.limits`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.npu.lengths import lengths_of
from tio_megatron.kernels.npu.limits import FLOATS, check_kind, names
from tio_megatron.kernels.operands import require

LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
"""Layouts and their number of axes."""
COMPRESSED = 2048
"""Edge of the mask of sparse modes 2, 3 and 4."""
MAX_HEADS = 256
MAX_SIZE = 768
MAX_TOKENS = 1 << 20
MAX_BATCH = 1 << 21
MAX_PACKED = 1024
"""Sequences of one TND call."""


def shape_of(layout: str, tensor: Tensor, heads: int) -> tuple[int, int, int, int]:
    """``(batch, sequence, heads, size)`` of a tensor; in TND the batch is 1 and the sequence all tokens."""
    s = tensor.shape
    if layout == "TND":
        return 1, s[0], s[1], s[2]
    if layout == "BSND":
        return s[0], s[1], s[2], s[3]
    if layout == "BNSD":
        return s[0], s[2], s[1], s[3]
    batch, length = (s[0], s[1]) if layout == "BSH" else (s[1], s[0])
    return batch, length, heads, s[2] // max(heads, 1)


def check_training(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    sparse_mode: int = 0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    keep_prob: float = 1.0,
) -> None:
    """One call of ``npu_fusion_attention``. Argument names are the operator's.

    Raises:
        ValueError: a layout, element type, head number, head size, length, mask or sparse mode that the documents forbid.
    """
    what = "npu_fusion_attention"
    require(input_layout in LAYOUTS, what, f"layout {input_layout!r}; it takes {', '.join(LAYOUTS)}")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        check_kind(what, name, tensor, FLOATS, LAYOUTS[input_layout])
        require(tensor.dtype == q.dtype, what, f"{name} is {names([tensor.dtype])} and query {names([q.dtype])}; they must be the same")
    require(1 <= head_num <= MAX_HEADS, what, f"{head_num} query heads; 1 to {MAX_HEADS}")
    packed = input_layout == "TND"
    batch, sq, heads, size = shape_of(input_layout, q, head_num)
    require(size >= 1, what, f"query {list(q.shape)}: a head of {size}; 1 to {MAX_SIZE}")
    if input_layout in ("BSH", "SBH"):
        require(q.shape[2] % head_num == 0, what, f"{q.shape[2]} columns of the query do not divide by {head_num} heads")
        require(k.shape[2] % size == 0, what, f"{k.shape[2]} columns of the key are not whole heads of {size}")
        groups = k.shape[2] // size
    else:
        require(heads == head_num, what, f"head_num {head_num}, but the query has {heads} heads")
        groups = shape_of(input_layout, k, 0)[2]
    require(groups > 0 and head_num % groups == 0, what, f"{head_num} query heads are not a multiple of {groups} key/value heads")
    key_batch, sk, _, key_size = shape_of(input_layout, k, groups)
    value_batch, sv, value_heads, value_size = shape_of(input_layout, v, groups)
    require(size == key_size, what, f"head size {size} of the query and {key_size} of the key; they must be the same")
    require(1 <= value_size <= key_size <= MAX_SIZE, what, f"head sizes {key_size} and {value_size}; at most {MAX_SIZE}, and the value's at most the key's")
    require((value_batch, sv, value_heads) == (key_batch, sk, groups), what, f"key {list(k.shape)} and value {list(v.shape)} differ")
    require(key_batch == batch and 1 <= batch <= MAX_BATCH, what, f"batches {batch} and {key_batch}; the same, 1 to {MAX_BATCH}")
    for name, length in (("query", sq), ("key", sk)):
        require(1 <= length <= MAX_TOKENS, what, f"{length} tokens of the {name}; 1 to {MAX_TOKENS}")
    require(0 < keep_prob <= 1, what, f"keep_prob {keep_prob}; above 0, at most 1")
    if packed:
        _check_packed(what, sq, sk, actual_seq_qlen, actual_seq_kvlen)
    else:
        require(actual_seq_qlen is None and actual_seq_kvlen is None, what, f"actual sequence lengths with layout {input_layout}; they belong to TND")
    _check_mask(what, atten_mask, sparse_mode, packed, batch, head_num, sq, sk, actual_seq_qlen, actual_seq_kvlen)


def _check_packed(what: str, sq: int, sk: int, ends_q: Sequence[int] | None, ends_k: Sequence[int] | None) -> None:
    if ends_q is None or ends_k is None:
        raise ValueError(f"{what}: layout TND needs actual_seq_qlen and actual_seq_kvlen, the cumulative ends")
    for name, ends, tokens in (("actual_seq_qlen", ends_q, sq), ("actual_seq_kvlen", ends_k, sk)):
        require(1 <= len(ends) <= MAX_PACKED, what, f"{name} has {len(ends)} sequences; 1 to {MAX_PACKED}")
        require(list(ends) == sorted(ends) and ends[0] >= 0, what, f"{name} {list(ends)[:8]} must ascend: cumulative ends, not lengths")
        require(ends[0] > 0, what, f"{name} begins with 0: cumulative ends without the leading 0")
        require(ends[-1] == tokens, what, f"{name} ends at {ends[-1]} of {tokens} tokens")
    require(len(ends_q) == len(ends_k), what, f"{len(ends_q)} sequences of queries and {len(ends_k)} of keys")


def _check_mask(
    what: str,
    mask: Tensor | None,
    mode: int,
    packed: bool,
    batch: int,
    heads: int,
    sq: int,
    sk: int,
    ends_q: Sequence[int] | None,
    ends_k: Sequence[int] | None,
) -> None:
    require(0 <= mode <= 8, what, f"sparse_mode {mode}; 0 to 8")
    require(mode not in (5, 6), what, f"sparse_mode {mode} (prefix) needs the length of the prefix, which is not passed here; 3 is causal")
    require(packed or mode not in (7, 8), what, f"sparse_mode {mode} is for layout TND alone")
    band = f"sparse_mode {mode} needs pre_tockens and next_tockens, which are not passed here and would show every key by default; 3 is causal"
    require(mode not in (4, 7, 8), what, band)
    if mask is None:
        require(mode == 0, what, f"sparse_mode {mode} without atten_mask: the operator would ignore the mode and attend to every key")
        return
    check_kind(what, "atten_mask", mask, (torch.bool, torch.uint8), 2, 4)
    shape = list(mask.shape)
    if mode in (2, 3):
        require(shape == [COMPRESSED] * 2, what, f"sparse_mode {mode} takes the compressed mask {[COMPRESSED] * 2}, got {shape}")
    else:
        if packed:
            full = [[max(lengths_of(ends_q or ())), max(lengths_of(ends_k or ()))]]
        else:
            full = [[sq, sk], [1, 1, sq, sk], [batch, 1, sq, sk], [batch, heads, sq, sk]]
        require(shape in full, what, f"sparse_mode {mode} takes the whole mask, {' or '.join(map(str, full))}, got {shape}")
    if packed and mode == 3:
        for i, (a, b) in enumerate(zip(lengths_of(ends_q or ()), lengths_of(ends_k or ()), strict=True)):
            require(a <= b, what, f"sequence {i} has {a} query tokens and {b} keys: sparse_mode 3 would leave rows without a key")
    require(packed or mode != 3 or sq <= sk, what, f"{sq} query tokens and {sk} keys: sparse_mode 3 would leave rows without a key")
