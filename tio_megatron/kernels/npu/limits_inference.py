"""What torch_npu's documents forbid in ``npu_fused_infer_attention_score`` and its second version. See :mod:`tio_megatron.kernels.npu.limits`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.npu.lengths import lengths_of
from tio_megatron.kernels.npu.limits import HALVES, check_kind, names
from tio_megatron.kernels.npu.limits_training import COMPRESSED
from tio_megatron.kernels.operands import require

LAYOUTS = {
    "BSH": 3,
    "BSND": 4,
    "BNSD": 4,
    "BNSD_BSND": 4,
    "TND": 3,
    "NTD_TND": 3,
}
"""Layouts (left the query's, right the result's) and their number of axes."""
WITH_ROPE = ("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD")
"""Layouts of latent attention alone (heads of 512, rotary parts in tensors of their own), which is not passed here."""
MAX_HEADS = 256
MAX_RATIO = 64
MAX_SIZE = 512
MAX_WIDTH = 65535
MAX_PACKED = 4096
MAX_BATCH = 65536
MAX_TOKENS = {1: 65536, 2: 1 << 20}
MAX_CACHE = 2**31 - 1
PAGES = (128, 256, 384, 512)
"""Keys of a page that serve every number of query tokens. One query token alone would allow any multiple of 16 up to 512."""


def sizes_of(layout: str, tensor: Tensor, heads: int) -> tuple[int, int, int, int]:
    """``(batch, tokens, heads, size)`` of a query; packed layouts have batch 0."""
    s = tensor.shape
    kind = layout.split("_")[0]
    if kind == "TND":
        return 0, s[0], s[1], s[2]
    if kind == "NTD":
        return 0, s[1], s[0], s[2]
    if kind == "BSND":
        return s[0], s[1], s[2], s[3]
    if kind == "BNSD":
        return s[0], s[2], s[1], s[3]
    return s[0], s[1], heads, s[2] // max(heads, 1)


def check_inference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    version: int,
    input_layout: str,
    num_heads: int,
    num_key_value_heads: int = 0,
    atten_mask: Tensor | None = None,
    sparse_mode: int = 0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    block_size: int = 0,
    inner_precise: int = 0,
) -> None:
    """One call of ``npu_fused_infer_attention_score`` (``version`` 1) or ``.._v2`` (2). Argument names are those of version 2.

    Raises:
        ValueError: a layout, element type, head number, head size, mask, sparse mode, length, page or precision that the documents forbid.
    """
    what = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    require(version in (1, 2), what, f"version {version}; 1 or 2")
    require(input_layout not in WITH_ROPE, what, f"layout {input_layout!r} is for latent attention with query_rope and key_rope; {', '.join(LAYOUTS)} are not")
    require(input_layout in LAYOUTS, what, f"layout {input_layout!r}; it takes {', '.join(LAYOUTS)}")
    check_kind(what, "query", q, HALVES, LAYOUTS[input_layout])
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        require(tensor.dtype == q.dtype, what, f"{name} is {names([tensor.dtype])} and query {names([q.dtype])}; they must be the same")
        require(tensor.is_contiguous(), what, f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    groups = num_key_value_heads or num_heads
    require(1 <= num_heads <= MAX_HEADS, what, f"{num_heads} query heads; 1 to {MAX_HEADS}")
    require(groups > 0 and num_heads % groups == 0, what, f"{num_heads} query heads are not a multiple of {groups} key/value heads")
    require(num_heads // groups <= MAX_RATIO, what, f"{num_heads} query heads for {groups} key/value heads; at most {MAX_RATIO} each")
    batch, tokens, heads, size = sizes_of(input_layout, q, num_heads)
    require(heads == num_heads, what, f"num_heads {num_heads}, but the query has {heads} heads")
    require(size % 16 == 0 and 16 <= size <= MAX_SIZE, what, f"head size {size}; a multiple of 16 up to {MAX_SIZE}")
    packed = batch == 0
    if input_layout.split("_")[0] in ("BSH", "BSND"):
        require(num_heads * size < MAX_WIDTH, what, f"{num_heads} heads of {size} with layout {input_layout}; below {MAX_WIDTH} together")
    if input_layout == "BNSD_BSND":
        require(tokens > 1, what, "layout BNSD_BSND needs more than one query token")
    if packed:
        queries = _packed(
            what, version, input_layout, q.dtype, tokens, size, v.shape[-1], num_heads, groups, actual_seq_qlen, actual_seq_kvlen, block_table is not None
        )
    else:
        require(1 <= batch <= MAX_BATCH, what, f"batch {batch}; 1 to {MAX_BATCH}")
        queries = [tokens] * batch
        _each(what, "actual_seq_qlen", actual_seq_qlen, batch, tokens)
    one = max(queries) <= 1
    require(k.shape[:-1] == v.shape[:-1], what, f"key {list(k.shape)} and value {list(v.shape)} differ")
    if block_table is not None:
        if not packed:
            _each(what, "actual_seq_kvlen", actual_seq_kvlen, batch, block_table.shape[-1] * block_size)
        _check_pages(what, k, v, input_layout, groups, size, block_table, block_size, actual_seq_kvlen, len(queries), one)
    else:
        _check_keys(what, input_layout, k, q, groups, size)
        kind = input_layout.split("_")[0]
        held = k.shape[{"TND": 0, "NTD": 1, "BNSD": 2}.get(kind, 1)]
        require(1 <= v.shape[-1] // (groups if kind == "BSH" else 1) <= MAX_SIZE, what, f"value {list(v.shape)}; a head of 1 to {MAX_SIZE}")
        if packed:
            ends = list(actual_seq_kvlen or ())
            require(ends[-1] == held, what, f"lengths of keys end at {ends[-1]} of {held} keys; cumulative ends up to the last key")
        else:
            _each(what, "actual_seq_kvlen", actual_seq_kvlen, batch, held)
            _check_dense_mask(what, atten_mask, sparse_mode, batch, num_heads, tokens, held)
        require(block_size == 0, what, f"block_size {block_size} without block_table")
    if packed and actual_seq_kvlen is not None:
        keys = list(actual_seq_kvlen) if block_table is not None else lengths_of(actual_seq_kvlen)
        if sparse_mode == 3:
            for i, (a, b) in enumerate(zip(queries, keys, strict=True)):
                require(a <= b, what, f"sequence {i} has {a} query tokens and {b} keys; sparse_mode 3 wants at least as many keys")
    _check_mask(what, atten_mask, sparse_mode, packed, one)
    require(
        0 <= inner_precise <= (1 if one else 3), what, f"inner_precise {inner_precise}; 0 to {1 if one else 3} for {'one query token' if one else 'several'}"
    )


def _each(what: str, name: str, given: Sequence[int] | None, batch: int, most: int) -> None:
    if given is not None:
        require(len(given) == 1 or len(given) >= batch, what, f"{name} has {len(given)} entries for a batch of {batch}; 1, or one each")
        require(min(given) >= 0 and max(given) <= most, what, f"{name} {list(given)[:8]}; from 0 to the {most} tokens that are there")


def _check_dense_mask(what: str, mask: Tensor | None, mode: int, batch: int, heads: int, queries: int, keys: int) -> None:
    """Without pages and not packed: the whole mask has the sizes of the tensors, and the causal mode leaves no row without a key."""
    if mode in (0, 1) and mask is not None:
        full = [[queries, keys], [1, queries, keys], [batch, queries, keys], [1, 1, queries, keys], [batch, 1, queries, keys], [batch, heads, queries, keys]]
        require(list(mask.shape) in full, what, f"sparse_mode {mode} takes the whole mask, {' or '.join(map(str, full[:3]))}, got {list(mask.shape)}")
    require(mode != 3 or queries <= keys, what, f"{queries} query tokens and {keys} keys: sparse_mode 3 would leave rows without a key; as many keys or more")


def _packed(
    what: str,
    version: int,
    layout: str,
    dtype: torch.dtype,
    tokens: int,
    size: int,
    value_size: int,
    heads: int,
    groups: int,
    ends_q: Sequence[int] | None,
    given_k: Sequence[int] | None,
    paged: bool,
) -> list[int]:
    """Packed layouts; returns the query tokens of each sequence."""
    if ends_q is None or given_k is None:
        raise ValueError(f"{what}: layout {layout} needs the lengths of queries (cumulative ends) and of keys")
    require(1 <= tokens <= MAX_TOKENS[version], what, f"{tokens} query tokens; 1 to {MAX_TOKENS[version]}")
    require(dtype == torch.bfloat16, what, f"layout {layout} with {names([dtype])}; it takes bfloat16")
    require(1 <= len(ends_q) <= MAX_PACKED, what, f"{len(ends_q)} sequences; 1 to {MAX_PACKED}")
    require(len(given_k) == len(ends_q), what, f"{len(ends_q)} sequences of queries and {len(given_k)} of keys")
    require(list(ends_q) == sorted(ends_q) and ends_q[0] >= 0, what, f"lengths of queries {list(ends_q)[:8]} must ascend: cumulative ends")
    require(ends_q[-1] == tokens, what, f"lengths of queries end at {ends_q[-1]} of {tokens} tokens")
    require(min(given_k) >= 0, what, f"lengths of keys {list(given_k)[:8]}; not below 0")
    if not paged:
        require(list(given_k) == sorted(given_k), what, f"lengths of keys {list(given_k)[:8]} must ascend: cumulative ends where there are no pages")
    if version == 1:
        # Published for the first version: keys as wide as 192, no groups, no pages. What engines pass beyond that is not documented.
        require(not paged, what, f"layout {layout} with pages; the documents allow them in version 2")
        require(size == 192, what, f"layout {layout} with head size {size}; 192 (version 2 takes 128)")
        require(heads == groups, what, f"layout {layout} with {heads} query heads and {groups} key/value heads; equal ones (version 2 takes groups)")
        require(heads in (8, 16, 32, 64, 128), what, f"layout {layout} with {heads} heads; 8, 16, 32, 64 or 128")
    else:
        # The rule is given for pages and without; a page's last axis may be all heads at once, which _check_pages sees.
        require(size in (128, 192), what, f"layout {layout} with head size {size}; 128 or 192")
        values = (128, 192) if layout == "TND" and size == 192 else (128,)
        require(paged or value_size in values, what, f"layout {layout} with heads of {size} and values of {value_size}; {' or '.join(map(str, values))}")
        require(not paged or layout == "TND", what, f"layout {layout} with pages; TND")
    return lengths_of(ends_q)


def _check_keys(what: str, layout: str, k: Tensor, q: Tensor, groups: int, size: int) -> None:
    kind = layout.split("_")[0]
    if kind == "BSH":
        require(
            k.dim() == 3 and k.shape[2] == groups * size and k.shape[0] == q.shape[0],
            what,
            f"key {list(k.shape)}; [{q.shape[0]}, S, {groups * size}] is expected",
        )
        return
    require(k.dim() == q.dim(), what, f"key {list(k.shape)} with layout {layout}")
    place = {"TND": 1, "NTD": 0, "BSND": 2, "BNSD": 1}[kind]
    require(k.shape[place] == groups and k.shape[-1] == size, what, f"key {list(k.shape)} with layout {layout}; {groups} heads of {size} are expected")
    require(kind in ("TND", "NTD") or k.shape[0] == q.shape[0], what, f"key {list(k.shape)} and query {list(q.shape)}: the batches differ")


def _check_pages(
    what: str,
    k: Tensor,
    v: Tensor,
    layout: str,
    groups: int,
    size: int,
    table: Tensor,
    page: int,
    counts: Sequence[int] | None,
    batch: int,
    one: bool,
) -> None:
    check_kind(what, "block_table", table, (torch.int32,), 2)
    require(table.shape[0] == batch, what, f"block_table has {table.shape[0]} rows for {batch} sequences")
    if counts is None:
        raise ValueError(f"{what}: pages need the length of every sequence's keys")
    if one:
        require(16 <= page <= 512 and page % 16 == 0, what, f"pages of {page} keys; a multiple of 16 up to 512 for one query token")
    else:
        require(page in PAGES, what, f"pages of {page} keys; a multiple of 128 up to 512")
    require(k.shape == v.shape, what, f"pages of keys {list(k.shape)} and of values {list(v.shape)} differ")
    require(k.numel() <= MAX_CACHE, what, f"{k.numel()} elements of one cache; at most {MAX_CACHE}")
    if k.dim() == 3:
        require(tuple(k.shape[1:]) == (page, groups * size), what, f"pages {list(k.shape)}; [pages, {page}, {groups * size}] is expected")
        require(
            groups * size <= MAX_WIDTH,
            what,
            f"{groups} heads of {size} in a page of three axes; at most {MAX_WIDTH} together, or use [pages, heads, page, size]",
        )
    else:
        kind = layout.split("_")[0]
        require(k.dim() == 4 and tuple(k.shape[1:]) == (groups, page, size), what, f"pages {list(k.shape)}; [pages, {groups}, {page}, {size}] is expected")
        require(kind in ("BNSD", "TND"), what, f"pages of four axes with layout {layout}; BNSD or TND, or three axes")
    # The documents also want as many pages as all sequences fill. Sequences that share pages of a common prefix need fewer, so only the longest counts.
    needed = -(-max(counts) // page)
    require(
        min(table.shape[1], k.shape[0]) >= needed, what, f"{k.shape[0]} pages and {table.shape[1]} columns of block_table; {needed} pages of {page} are needed"
    )


def _check_mask(what: str, mask: Tensor | None, mode: int, packed: bool, one: bool) -> None:
    require(0 <= mode <= 4, what, f"sparse_mode {mode}; 0 to 4")
    if packed:
        fits = (mode == 0 and mask is None) or (mode in (3, 4) and mask is not None)
        given = "with" if mask is not None else "without"
        require(fits, what, f"sparse_mode {mode} {given} atten_mask in a packed layout; 0 without, or 3 (causal) or 4 (band) with")
    require(mode == 0 or mask is not None, what, f"sparse_mode {mode} without atten_mask")
    if mask is None:
        return
    check_kind(what, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8), 2, 3, 4)
    require(mask.is_contiguous(), what, "atten_mask must be contiguous")
    if mode in (2, 3, 4):
        shape = [n for n in mask.shape if n != 1] if mask.dim() > 2 else list(mask.shape)
        require(shape == [COMPRESSED] * 2, what, f"sparse_mode {mode} takes the compressed mask {[COMPRESSED] * 2}, got {list(mask.shape)}")
