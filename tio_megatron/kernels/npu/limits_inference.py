"""What torch_npu's documents forbid in ``npu_fused_infer_attention_score`` and its second version. See :mod:`tio_megatron.kernels.npu.limits`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tio_megatron.kernels.npu.lengths import lengths_of
from tio_megatron.kernels.npu.limits import HALVES, check_kind, names
from tio_megatron.kernels.npu.limits_masks import check_causal, check_mode, check_whole
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
"""Tokens of a packed call, of queries and of keys, by version."""
MAX_LENGTH = 20 * (1 << 20)
MAX_KEYS = 1 << 18
"""Keys of a sequence with one query token; ``MAX_LENGTH`` is for several, keys and query tokens alike."""
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
    shared_pages: bool = False,
) -> None:
    """One call of ``npu_fused_infer_attention_score`` (``version`` 1) or ``.._v2`` (2). Argument names are those of version 2.

    Args:
        shared_pages: sequences may share the pages of a common prefix, as engines do. The documents want as many pages as all sequences fill,
            whether or not they share; with this, as many as the longest fills are enough.

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
    if input_layout == "BSH":
        require(q.shape[2] % num_heads == 0, what, f"{q.shape[2]} columns of the query do not divide by {num_heads} heads")
    batch, tokens, heads, size = sizes_of(input_layout, q, num_heads)
    require(heads == num_heads, what, f"num_heads {num_heads}, but the query has {heads} heads")
    require(size % 16 == 0 and 16 <= size <= MAX_SIZE, what, f"head size {size}; a multiple of 16 up to {MAX_SIZE}")
    packed = batch == 0 and input_layout.split("_")[0] in ("TND", "NTD")
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
        queries = _each(what, "actual_seq_qlen", actual_seq_qlen, batch, tokens)
    one = max(queries) <= 1 if packed else tokens == 1
    if block_table is not None:
        if actual_seq_kvlen is None:
            raise ValueError(f"{what}: pages need the length of every sequence's keys")
        check_kind(what, "block_table", block_table, (torch.int32,), 2)
        columns = block_table.shape[1]
        keys = list(actual_seq_kvlen) if packed else _each(what, "actual_seq_kvlen", actual_seq_kvlen, batch, columns * block_size)
        needed = _check_pages(what, k, v, input_layout, groups, size, block_table, block_size, keys, one, shared_pages)
        # Version 1 says so for one query token; elsewhere both ask for the pages of the longest sequence.
        held = (columns if version == 1 and one else needed) * block_size
    else:
        held = _check_keys(what, input_layout, k, v, q, groups, size)
        if packed:
            ends = list(actual_seq_kvlen or ())
            require(held <= MAX_TOKENS[version], what, f"{held} keys in a packed layout; at most {MAX_TOKENS[version]}, or pages")
            require(ends[-1] == held, what, f"lengths of keys end at {ends[-1]} of {held} keys; cumulative ends up to the last key")
            keys = lengths_of(ends)
        else:
            keys = _each(what, "actual_seq_kvlen", actual_seq_kvlen, batch, held)
        require(block_size == 0, what, f"block_size {block_size} without block_table")
    _check_lengths(what, tokens if not packed else max(queries), max(keys) if packed or block_table is not None else held, one)
    check_mode(what, atten_mask, sparse_mode, packed)
    if not packed and atten_mask is not None and sparse_mode in (0, 1):
        check_whole(what, atten_mask, sparse_mode, batch, tokens, held, at_least=block_table is not None)
    if sparse_mode == 3:
        check_causal(what, queries, keys)
    require(
        0 <= inner_precise <= (1 if one else 3), what, f"inner_precise {inner_precise}; 0 to {1 if one else 3} for {'one query token' if one else 'several'}"
    )


def _each(what: str, name: str, given: Sequence[int] | None, batch: int, most: int) -> list[int]:
    """The length of each of ``batch`` sequences: all that is there, one for all, or one each (more are not looked at)."""
    if given is None:
        return [most] * batch
    require(len(given) == 1 or len(given) >= batch, what, f"{name} has {len(given)} entries for a batch of {batch}; 1, or one each")
    lengths = list(given) * batch if len(given) == 1 else list(given)[:batch]
    require(min(lengths) >= 0 and max(lengths) <= most, what, f"{name} {lengths[:8]}; from 0 to the {most} tokens that are there")
    return lengths


def _check_lengths(what: str, queries: int, keys: int, one: bool) -> None:
    """The longest sequence."""
    require(queries <= MAX_LENGTH, what, f"{queries} query tokens of a sequence; at most {MAX_LENGTH}: pass them in parts")
    most = MAX_KEYS if one else MAX_LENGTH
    require(keys <= most, what, f"{keys} keys of a sequence for {'one query token' if one else 'several query tokens'}; at most {most}")


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


def _check_keys(what: str, layout: str, k: Tensor, v: Tensor, q: Tensor, groups: int, size: int) -> int:
    """Keys and values that are not in pages; returns how many there are, of a sequence or, packed, of all."""
    kind = layout.split("_")[0]
    if kind in ("TND", "NTD"):  # whose documents give the value a size of its own, which _packed has seen
        require(k.shape[:-1] == v.shape[:-1], what, f"key {list(k.shape)} and value {list(v.shape)} differ in more than the head size")
    else:
        require(k.shape == v.shape, what, f"key {list(k.shape)} and value {list(v.shape)} differ; their shapes must be the same")
    if kind == "BSH":
        require(
            k.dim() == 3 and k.shape[2] == groups * size and k.shape[0] == q.shape[0],
            what,
            f"key {list(k.shape)}; [{q.shape[0]}, S, {groups * size}] is expected",
        )
        return k.shape[1]
    require(k.dim() == q.dim(), what, f"key {list(k.shape)} with layout {layout}")
    place, along = {"TND": (1, 0), "NTD": (0, 1), "BSND": (2, 1), "BNSD": (1, 2)}[kind]
    require(k.shape[place] == groups and k.shape[-1] == size, what, f"key {list(k.shape)} with layout {layout}; {groups} heads of {size} are expected")
    require(kind in ("TND", "NTD") or k.shape[0] == q.shape[0], what, f"key {list(k.shape)} and query {list(q.shape)}: the batches differ")
    return k.shape[along]


def _check_pages(
    what: str,
    k: Tensor,
    v: Tensor,
    layout: str,
    groups: int,
    size: int,
    table: Tensor,
    page: int,
    counts: Sequence[int],
    one: bool,
    shared: bool,
) -> int:
    """Keys and values in pages; returns the pages of the longest sequence."""
    require(table.shape[0] == len(counts), what, f"block_table has {table.shape[0]} rows for {len(counts)} sequences")
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
    each = [-(-count // page) for count in counts]
    longest = max(each)
    require(table.shape[1] >= longest, what, f"block_table has {table.shape[1]} columns; {longest} pages of {page} are needed for the longest sequence")
    least, whose = (longest, "the longest sequence") if shared else (sum(each), "all sequences together")
    require(k.shape[0] >= least, what, f"{k.shape[0]} pages of {page}; {least} are needed for {whose}")
    return longest
